"""Batches: formed first in, first out; lent, acked, given back, taken apart."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import sqlalchemy as sa

from vime_buffer._rules import is_too_old
from vime_buffer._store import counters, groups, leases, prompts, runs
from vime_buffer._store.database import Transaction
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import BatchState, LeaseKind, PromptState, Purpose, batches, samples
from vime_buffer._store.schema import groups as group_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError


def lease(
    tx: Transaction, run: Run, holder: str, incarnation: str, ttl: float, data_ended: bool
) -> pb.LeaseBatchResponse:
    """Lends the next batch.

    Args:
        data_ended: whether no prompt will come any more, so that a short batch is all there will be.
    """
    ahead = len(leases.leased_targets(tx, run.run_id, LeaseKind.BATCH))
    ordinal = run.trained + ahead
    batch_id = _formed(tx, run, ordinal) or _form(tx, run, ordinal, data_ended)
    if batch_id is None:
        return pb.LeaseBatchResponse(outcome=pb.LEASE_OUTCOME_EMPTY)
    tx.execute(_at(run.run_id, batch_id).values(state=int(BatchState.LEASED)))
    (lease_id,) = leases.grant(tx, run, LeaseKind.BATCH, holder, incarnation, [(batch_id, Purpose.TRAIN, 1)], ttl)
    response = pb.LeaseBatchResponse(
        outcome=pb.LEASE_OUTCOME_GRANTED, lease_id=lease_id, batch_id=batch_id, ordinal=ordinal, ttl_seconds=ttl
    )
    # Within a batch the order of the prompts, not of the commits: it does not depend on which answer came first.
    content = sa.select(group_rows.c.content).where(*_in_batch(run.run_id, batch_id)).order_by(group_rows.c.seq)
    for index in tx.execute(content).scalars():
        response.groups.append(pb.GroupIndex.FromString(index))
    return response


def _at(run_id: str, batch_id: str):
    return batches.update().where(batches.c.run_id == run_id, batches.c.batch_id == batch_id)


def _in_batch(run_id: str, batch_id: str):
    return group_rows.c.run_id == run_id, group_rows.c.batch_id == batch_id


def _formed(tx: Transaction, run: Run, ordinal: int) -> str | None:
    """The first batch that was formed before and is free; those that became too old are taken apart."""
    statement = (
        sa.select(batches.c.batch_id)
        .where(batches.c.run_id == run.run_id, batches.c.state == int(BatchState.FORMED))
        .order_by(batches.c.sequence)
    )
    for batch_id in tx.execute(statement).scalars().all():
        oldest = tx.execute(
            sa.select(sa.func.min(group_rows.c.oldest)).where(*_in_batch(run.run_id, batch_id))
        ).scalar()
        if not is_too_old(oldest, ordinal, run.max_staleness):
            return batch_id
        take_apart(tx, run.run_id, batch_id)
    return None


def _form(tx: Transaction, run: Run, ordinal: int, data_ended: bool) -> str | None:
    statement = (
        sa.select(group_rows.c.group_id, group_rows.c.oldest)
        .where(*_in_batch(run.run_id, ""))
        .order_by(group_rows.c.ready)
    )
    waiting = tx.execute(statement).all()
    old = [row.group_id for row in waiting if is_too_old(row.oldest, ordinal, run.max_staleness)]
    expire(tx, run, old, f"too old for batch {ordinal} under max_staleness {run.max_staleness}")
    dropped = set(old)
    fresh = [row.group_id for row in waiting if row.group_id not in dropped][: run.batch_groups]
    if old:
        # Their prompts are leased again, so the data is not at its end.
        data_ended = data_ended and not _requeued(tx, run.run_id)
    if not fresh or (len(fresh) < run.batch_groups and not data_ended):
        return None
    batch_id = f"{run.run_id}-batch-{run.next_batch}"
    tx.execute(
        batches.insert(),
        {
            "run_id": run.run_id,
            "batch_id": batch_id,
            "sequence": run.next_batch,
            "state": int(BatchState.FORMED),
            "ordinal": None,
        },
    )
    runs.update(tx, run.run_id, next_batch=run.next_batch + 1)
    tx.execute(
        group_rows.update()
        .where(group_rows.c.run_id == run.run_id, group_rows.c.group_id.in_(fresh))
        .values(batch_id=batch_id)
    )
    prompts.set_state(tx, run.run_id, fresh, PromptState.BATCHED)
    return batch_id


def _requeued(tx: Transaction, run_id: str) -> int:
    return prompts.count(tx, run_id, Purpose.TRAIN, PromptState.PENDING)


def expire(tx: Transaction, run: Run, group_ids: Sequence[str], reason: str) -> None:
    """Removes groups that became too old; their prompts are leased again or dropped."""
    groups.remove(tx, run.run_id, group_ids)
    counters.add(tx, run.run_id, counters.EXPIRED, len(group_ids))
    for group_id in group_ids:
        prompts.fail(tx, run, group_id, reason)


def take_apart(tx: Transaction, run_id: str, batch_id: str) -> None:
    """Dissolves a batch; its groups wait again, at their old places."""
    members = list(tx.execute(sa.select(group_rows.c.group_id).where(*_in_batch(run_id, batch_id))).scalars())
    tx.execute(group_rows.update().where(*_in_batch(run_id, batch_id)).values(batch_id=""))
    prompts.set_state(tx, run_id, members, PromptState.READY)
    tx.execute(batches.delete().where(batches.c.run_id == run_id, batches.c.batch_id == batch_id))


def ack(tx: Transaction, run: Run, lease_id: str) -> pb.AckBatchResponse:
    """Takes note that a batch is contained in the weights."""
    held = leases.find_open(tx, run.run_id, lease_id, LeaseKind.BATCH)
    leases.end(tx, [lease_id], "acked")
    tx.execute(_at(run.run_id, held.target).values(state=int(BatchState.ACKED), ordinal=run.trained))
    prompts.set_state(tx, run.run_id, _members(tx, run.run_id, held.target), PromptState.TRAINED)
    runs.update(tx, run.run_id, trained=run.trained + 1)
    tx.changed = True
    return pb.AckBatchResponse(trained=run.trained + 1)


def _members(tx: Transaction, run_id: str, batch_id: str) -> list[str]:
    return list(tx.execute(sa.select(group_rows.c.group_id).where(*_in_batch(run_id, batch_id))).scalars())


def nack(tx: Transaction, run: Run, request: pb.NackBatchRequest) -> None:
    """Takes a batch back. Without refused samples it is lent again as it is.

    Raises:
        ContractError: a refused sample that is not in the batch; nothing changes.
    """
    held = leases.find_open(tx, run.run_id, request.lease_id, LeaseKind.BATCH)
    refused = _groups_of(tx, run.run_id, held.target, request.refused_samples)
    leases.end(tx, [request.lease_id], "nacked")
    tx.execute(_at(run.run_id, held.target).values(state=int(BatchState.FORMED)))
    tx.changed = True
    if not refused:
        return
    take_apart(tx, run.run_id, held.target)
    groups.remove(tx, run.run_id, list(refused))
    for group_id, reason in refused.items():
        prompts.fail(tx, run, group_id, reason)


def _groups_of(tx: Transaction, run_id: str, batch_id: str, refused) -> dict[str, str]:
    if not refused:
        return {}
    rows = tx.execute(
        sa.select(samples.c.sample_id, samples.c.group_id).where(
            samples.c.run_id == run_id, samples.c.sample_id.in_(list(refused))
        )
    )
    group_of = {sample_id: group_id for sample_id, group_id in rows}
    members = set(_members(tx, run_id, batch_id))
    found: dict[str, str] = {}
    for sample_id in sorted(refused):
        if group_of.get(sample_id) not in members:
            raise ContractError(f"refused_samples[{sample_id!r}]", f"no such sample in batch {batch_id!r}")
        found[group_of[sample_id]] = f"sample {sample_id!r} was refused: {refused[sample_id]}"
    return found


def check_rewound(run: Run) -> None:
    """Refuses training calls between OpenRun of a new lineage and its Rewind."""
    if run.rewind_due:
        raise runs.rewind_first(run)


def check_batch_number(run: Run, batch: int, field: str) -> None:
    """Refuses a checkpoint of batches that were not acked, or whose successors are collected.

    Raises:
        ContractError: above the acked batches.
        StatusError: FAILED_PRECONDITION, below what was collected.
    """
    if batch > run.trained:
        raise ContractError(field, f"{batch} exceeds the {run.trained} acked batches of run {run.run_id!r}")
    if batch < run.collected:
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{field}: batches before {run.collected} of run {run.run_id!r} are collected; {batch} cannot be restored",
        )
