"""Counters of a run, read from rows."""

from __future__ import annotations

import sqlalchemy as sa

from vime_buffer._rules import capacity
from vime_buffer._store import counters, evaluations, payloads, prompts, runs
from vime_buffer._store.database import Transaction
from vime_buffer._store.leases import leased_targets
from vime_buffer._store.schema import LeaseKind, PromptState, Purpose
from vime_buffer._store.schema import groups as group_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb


def stats(tx: Transaction, run_id: str) -> pb.GetStatsResponse:
    """The counters.

    Raises:
        StatusError: NOT_FOUND for an unknown run.
    """
    run = runs.get(tx, run_id)
    under_way = prompts.occupancy(tx, run_id)
    totals = counters.read(tx, run_id)
    total = lambda name: sum(totals.get(name, {}).values())  # noqa: E731
    on_loan = leased_targets(tx, run_id, LeaseKind.BATCH)
    in_batches = tx.execute(
        sa.select(sa.func.count()).where(group_rows.c.run_id == run_id, group_rows.c.batch_id.in_(on_loan))
    ).scalar_one()
    response = pb.GetStatsResponse(
        prompts_leased=under_way.leased,
        # A batch that is formed but free waits as its groups do.
        groups_ready=under_way.ready + under_way.batched - in_batches,
        groups_batch_leased=in_batches,
        batches_trained=run.trained,
        version=run.version,
        capacity=0 if run.closed else capacity(run.limits, run.trained, run.version, under_way),
        groups_committed_total=total(counters.COMMITTED),
        groups_filtered_total=totals.get(counters.FILTERED, {}),
        groups_expired_total=total(counters.EXPIRED),
        prompts_dropped_total=total(counters.DROPPED),
        leases_lapsed_total=total(counters.LAPSED),
        prompts_read_total=total(counters.READ),
        rollouts_failed_total=totals.get(counters.ROLLOUTS_FAILED, {}),
        payload_bytes=payloads.stored_bytes(tx, run_id),
        evaluations_open=len(evaluations.open_evaluations(tx, run_id)),
        closed=run.closed,
        prompts_requeued=_requeued(tx, run_id),
    )
    return response


def _requeued(tx: Transaction, run_id: str) -> int:
    """Prompts that wait although they were leased before."""
    rows = prompts.prompts
    statement = sa.select(sa.func.count()).where(
        rows.c.run_id == run_id,
        rows.c.purpose == int(Purpose.TRAIN),
        rows.c.state == int(PromptState.PENDING),
        rows.c.attempts > 0,
    )
    return tx.execute(statement).scalar_one()
