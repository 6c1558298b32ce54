"""Going back to a checkpoint, and collecting what no checkpoint needs."""

from __future__ import annotations

import sqlalchemy as sa

from vime_buffer._rules import alive, unpack_versions
from vime_buffer._store import batches, counters, evaluations, groups, leases, prompts, runs
from vime_buffer._store.database import Transaction
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import BatchState, PromptState, Purpose
from vime_buffer._store.schema import batches as batch_rows
from vime_buffer._store.schema import groups as group_rows
from vime_buffer._store.schema import prompts as prompt_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError
from vime_proto.version import LineageTree


def open_lineage(tx: Transaction, run: Run) -> None:
    """What a new lineage does at once: every lease ends, and nothing is granted before its first publication.

    So do evaluations: no engine will serve a version of the old lineage again, and workers would wait for one in vain.
    """
    leases.end_all(tx, run.run_id, "a new lineage was opened")
    evaluations.abandon_all(tx, run.run_id, "a new lineage was opened")
    runs.update(tx, run.run_id, version=None, rewind_due=True)


def rewind(tx: Transaction, run: Run, request: pb.RewindRequest) -> pb.RewindResponse:
    """Makes batches acked after the checkpoint ready again.

    A batch that holds no dead version comes back as it was. Of one that does, the live groups wait again at their old places, and
    the prompts of the dead ones are leased again.
    """
    lineage = request.lineage
    if lineage.HasField("forked_at") and lineage.forked_at != request.batch:
        raise ContractError("lineage.forked_at", f"must equal batch {request.batch}, got {lineage.forked_at}")
    added = runs.add_lineage(tx, run.run_id, lineage)
    if added:
        runs.update(tx, run.run_id, lineage=lineage.ordinal)
        open_lineage(tx, run)
    fresh = run.trained == 0 and run.next_batch == 0
    if not fresh:
        batches.check_batch_number(run, request.batch, "batch")
    tree = runs.lineage_tree(tx, run.run_id)
    leases.end_all(tx, run.run_id, "rewound")
    _undo_acks(tx, run.run_id, request.batch)
    expired, broken = _expire_dead(tx, run, tree)
    for batch_id in broken:
        batches.take_apart(tx, run.run_id, batch_id)
    _reconsider_filtered(tx, run.run_id, tree)
    # The lineage has published nothing yet: its weights are not on the engines.
    runs.update(tx, run.run_id, trained=request.batch, version=None, rewind_due=False, closed=False, closed_reason="")
    tx.changed = True
    return pb.RewindResponse(batches_restored=_formed(tx, run.run_id), groups_expired=expired)


def _expire_dead(tx: Transaction, run: Run, tree: LineageTree) -> tuple[int, list[str]]:
    """Removes groups of dead versions; answers how many, and the batches that lost one."""
    rows = tx.execute(
        sa.select(group_rows.c.group_id, group_rows.c.versions, group_rows.c.batch_id).where(
            group_rows.c.run_id == run.run_id
        )
    ).all()
    # Batches that the checkpoint contains are history, whatever their versions.
    kept = set(
        tx.execute(
            sa.select(batch_rows.c.batch_id).where(
                batch_rows.c.run_id == run.run_id, batch_rows.c.state == int(BatchState.ACKED)
            )
        ).scalars()
    )
    dead = [row for row in rows if row.batch_id not in kept and not alive(unpack_versions(row.versions), tree)]
    ids = [row.group_id for row in dead]
    for start in range(0, len(ids), 500):
        part = ids[start : start + 500]
        groups.remove(tx, run.run_id, part)
        # The restore is not the prompt's fault: no failure is counted.
        prompts.requeue(tx, run.run_id, part)
    counters.add(tx, run.run_id, counters.EXPIRED, len(ids))
    return len(ids), sorted({row.batch_id for row in dead if row.batch_id})


def _undo_acks(tx: Transaction, run_id: str, batch: int) -> None:
    later = (
        batch_rows.c.run_id == run_id,
        batch_rows.c.state == int(BatchState.ACKED),
        batch_rows.c.ordinal >= batch,
    )
    ids = list(tx.execute(sa.select(batch_rows.c.batch_id).where(*later)).scalars())
    if not ids:
        return
    tx.execute(batch_rows.update().where(*later).values(state=int(BatchState.FORMED), ordinal=None))
    members = sa.select(group_rows.c.group_id).where(group_rows.c.run_id == run_id, group_rows.c.batch_id.in_(ids))
    prompts.set_state(tx, run_id, list(tx.execute(members).scalars()), PromptState.BATCHED)


def _reconsider_filtered(tx: Transaction, run_id: str, tree: LineageTree) -> None:
    """A verdict on answers of dead weights is void: the prompt is leased again."""
    rows = tx.execute(
        sa.select(prompt_rows.c.prompt_id, prompt_rows.c.versions).where(
            prompt_rows.c.run_id == run_id,
            prompt_rows.c.purpose == int(Purpose.TRAIN),
            prompt_rows.c.state == int(PromptState.FILTERED),
        )
    ).all()
    void = [row.prompt_id for row in rows if not alive(unpack_versions(row.versions), tree)]
    prompts.set_state(tx, run_id, void, PromptState.PENDING, versions="", reason="")


def _formed(tx: Transaction, run_id: str) -> int:
    statement = sa.select(sa.func.count()).where(
        batch_rows.c.run_id == run_id, batch_rows.c.state == int(BatchState.FORMED)
    )
    return tx.execute(statement).scalar_one()


def report_checkpoint(tx: Transaction, run: Run, request: pb.ReportCheckpointRequest) -> None:
    """Notes a checkpoint and collects batches that only older ones than the oldest restorable need.

    Raises:
        ContractError: more batches than were acked, or an oldest one above the checkpoint.
    """
    batches.check_rewound(run)
    batches.check_batch_number(run, request.batch, "batch")
    runs.update(tx, run.run_id, checkpoint=request.batch)
    oldest = request.oldest_restorable
    if oldest <= run.collected:
        return
    done = (
        batch_rows.c.run_id == run.run_id,
        batch_rows.c.state == int(BatchState.ACKED),
        batch_rows.c.ordinal < oldest,
    )
    ids = list(tx.execute(sa.select(batch_rows.c.batch_id).where(*done)).scalars())
    members = list(
        tx.execute(
            sa.select(group_rows.c.group_id).where(group_rows.c.run_id == run.run_id, group_rows.c.batch_id.in_(ids))
        ).scalars()
    )
    for start in range(0, len(members), 500):
        part = members[start : start + 500]
        groups.remove(tx, run.run_id, part)
        prompts.set_state(tx, run.run_id, part, PromptState.TRAINED, payload=None, partial=None)
    tx.execute(batch_rows.delete().where(*done))
    runs.update(tx, run.run_id, collected=oldest)
