"""Groups on their way in: what a commit becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import grpc
import sqlalchemy as sa

from vime_buffer._intake import Intake
from vime_buffer._rules import alive, is_too_old, pack_versions
from vime_buffer._store import counters, leases, payloads, prompts, runs
from vime_buffer._store.database import Transaction
from vime_buffer._store.leases import Lease
from vime_buffer._store.payloads import SampleRow
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import LeaseKind, PromptState, Purpose, groups
from vime_buffer._store.schema import leases as lease_rows
from vime_buffer._store.schema import prompts as prompt_rows
from vime_buffer._store.schema import runs as run_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import StatusError

# Lease, prompt and run in one look: a commit needs all three, twice.
_LEASE_COLUMNS = len(lease_rows.c)
_CONTEXT = (
    sa.select(*lease_rows.c, prompt_rows.c.group_size, prompt_rows.c.seq, prompt_rows.c.evaluation_id, *run_rows.c)
    .join(
        prompt_rows,
        sa.and_(prompt_rows.c.run_id == lease_rows.c.run_id, prompt_rows.c.prompt_id == lease_rows.c.target),
    )
    .join(run_rows, run_rows.c.run_id == lease_rows.c.run_id)
    .where(lease_rows.c.lease_id == sa.bindparam("lease"), lease_rows.c.run_id == sa.bindparam("run"))
)
_INSERT = groups.insert()
_NEXT_READY = (
    run_rows.update().where(run_rows.c.run_id == sa.bindparam("run")).values(next_ready=run_rows.c.next_ready + 1)
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the group's content alone decides.

    Attributes:
        outcome: READY, FILTERED, RETRY or EVALUATED; staleness and attempts may turn READY into EXPIRED and RETRY into DROPPED.
        reason: why, unless READY or EVALUATED.
        label: short form of the reason, for counters.
    """

    outcome: int
    reason: str = ""
    label: str = ""


@dataclasses.dataclass(frozen=True)
class CommitContext:
    """What a commit is judged against."""

    run: Run
    lease: Lease
    group_size: int
    seq: int
    evaluation_id: str

    @property
    def evaluation(self) -> bool:
        return self.lease.purpose == Purpose.EVALUATE


def open_commit(tx: Transaction, request: pb.CommitGroupRequest) -> CommitContext:
    """The lease and run of a commit.

    Raises:
        StatusError: ABORTED for a lease that is no longer held or another attempt, NOT_FOUND for an unknown run.
    """
    row = tx.execute(_CONTEXT, {"lease": request.lease_id, "run": request.run_id}).first()
    if row is None:
        run = runs.get(tx, request.run_id)
        leases.check_open(tx, run.run_id, request.lease_id, LeaseKind.PROMPT, None)
    lease = Lease(*row[:_LEASE_COLUMNS])
    group_size, seq, evaluation_id = row[_LEASE_COLUMNS : _LEASE_COLUMNS + 3]
    run = Run(*row[_LEASE_COLUMNS + 3 :])
    leases.check_open(tx, run.run_id, request.lease_id, LeaseKind.PROMPT, lease)
    if lease.attempt != request.attempt:
        raise StatusError(
            grpc.StatusCode.ABORTED,
            f"lease_id {lease.lease_id!r} is for attempt {lease.attempt} of prompt {lease.target!r}, not {request.attempt}",
        )
    # Prompts of an evaluation state their size themselves.
    return CommitContext(run, lease, group_size or run.group_size, seq, evaluation_id)


def is_stale(tx: Transaction, run: Run, intake: Intake) -> str:
    """Why a group may not be trained on any more; empty when it may."""
    old_lineages = any(lineage != run.lineage for lineage, _ in intake.versions)
    if old_lineages and not alive(intake.versions, runs.lineage_tree(tx, run.run_id)):
        return f"a segment of version {pack_versions(intake.versions)} is of a dead lineage"
    if is_too_old(intake.oldest, run.trained, run.max_staleness):
        return (
            f"oldest segment of version {intake.oldest} with {run.trained} batches trained: "
            f"older than max_staleness {run.max_staleness}"
        )
    return ""


def commit(
    tx: Transaction, context: CommitContext, intake: Intake, verdict: Verdict, rows: Sequence[SampleRow]
) -> pb.CommitGroupResponse:
    """Takes a training group in; the lease ends whatever comes of it."""
    run, lease = context.run, context.lease
    payloads.check_blobs(tx, run.run_id, intake.blob_fields)
    payloads.check_new_samples(tx, run.run_id, intake.sample_fields)
    leases.end_one(tx, lease.lease_id, "committed")
    counters.add(tx, run.run_id, counters.COMMITTED)
    count_failures(tx, run.run_id, intake)
    tx.changed = True
    stale = is_stale(tx, run, intake)
    if stale:
        counters.add(tx, run.run_id, counters.EXPIRED)
        prompts.fail(tx, run, lease.target, stale)
        return _not_kept(tx, run, rows, pb.COMMIT_OUTCOME_EXPIRED, stale)
    if verdict.outcome == pb.COMMIT_OUTCOME_FILTERED:
        counters.add(tx, run.run_id, counters.FILTERED, label=verdict.label)
        prompts.set_state(
            tx,
            run.run_id,
            [lease.target],
            PromptState.FILTERED,
            reason=verdict.reason,
            versions=pack_versions(intake.versions),
            partial=None,
        )
        return _not_kept(tx, run, rows, verdict.outcome, verdict.reason)
    if verdict.outcome == pb.COMMIT_OUTCOME_RETRY:
        dropped = prompts.fail(tx, run, lease.target, verdict.reason)
        outcome = pb.COMMIT_OUTCOME_DROPPED if dropped else verdict.outcome
        return _not_kept(tx, run, rows, outcome, verdict.reason)
    _keep(tx, context, intake, rows)
    return pb.CommitGroupResponse(outcome=pb.COMMIT_OUTCOME_READY)


def count_failures(tx: Transaction, run_id: str, intake: Intake) -> None:
    """Counts failed rollouts by stage."""
    for stage, _ in intake.failures:
        counters.add(tx, run_id, counters.ROLLOUTS_FAILED, label=stage)


def _keep(tx: Transaction, context: CommitContext, intake: Intake, rows: Sequence[SampleRow]) -> None:
    run, lease = context.run, context.lease
    tx.execute(
        _INSERT,
        {
            "run_id": run.run_id,
            "group_id": lease.target,
            "seq": context.seq,
            "ready": run.next_ready,
            "attempt": lease.attempt,
            "content": intake.index.SerializeToString(),
            "oldest": intake.oldest,
            "versions": pack_versions(intake.versions),
            "batch_id": "",
        },
    )
    tx.execute(_NEXT_READY, {"run": run.run_id})
    payloads.insert_samples(tx, run.run_id, lease.target, rows)
    prompts.settle(tx, run.run_id, lease.target, PromptState.READY)


def _not_kept(tx: Transaction, run: Run, rows: Sequence[SampleRow], outcome: int, reason: str):
    payloads.delete_unowned(tx, run.run_id, [row.trace_blob for row in rows if row.trace_blob])
    tx.delete_after += [file.path for row in rows for file in (row.body_file, row.trace_file) if file is not None]
    return pb.CommitGroupResponse(outcome=outcome, reason=reason)


def remove(tx: Transaction, run_id: str, group_ids: Sequence[str]) -> None:
    """Deletes groups with everything they own."""
    if group_ids:
        payloads.delete_groups_samples(tx, run_id, group_ids)
        tx.execute(groups.delete().where(groups.c.run_id == run_id, groups.c.group_id.in_(group_ids)))
