"""The in-memory buffer's batches: formed first in, first out; lent, acked, given back; rewind; evaluation results."""

from __future__ import annotations

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError
from vime_proto.fakes._buffer_rows import BatchRow, EvaluationRow, RunRow, State
from vime_proto.fakes._buffer_store import BufferStore
from vime_proto.sample.v1 import sample_pb2
from vime_proto.sample_views import group_index, group_samples, segment_versions


def lease_batch(store: BufferStore, run: RunRow, request: pb.LeaseBatchRequest) -> pb.LeaseBatchResponse:
    """Lends the next batch; what became too old for it expires first."""
    if run.closed:
        return pb.LeaseBatchResponse(outcome=pb.LEASE_OUTCOME_END_OF_DATA)
    store.enter(run, True, request.holder, request.incarnation)
    ordinal = run.trained + sum(batch.leased for batch in run.batches)
    batch = _free(store, run, ordinal) or _form(store, run, ordinal)
    if batch is None:
        ended = store.exhausted(run) and not store.unfinished(run)
        return pb.LeaseBatchResponse(outcome=pb.LEASE_OUTCOME_END_OF_DATA if ended else pb.LEASE_OUTCOME_EMPTY)
    batch.leased = True
    lease = store.grant(run, batch.batch_id, True, request.holder, request.incarnation)
    return pb.LeaseBatchResponse(
        outcome=pb.LEASE_OUTCOME_GRANTED,
        lease_id=lease.lease_id,
        batch_id=batch.batch_id,
        ordinal=ordinal,
        ttl_seconds=store.ttl,
        groups=[
            index_of(run.prompts[group_id].group, run.prompts[group_id].committed_attempt)
            for group_id in batch.group_ids
        ],
    )


def _free(store: BufferStore, run: RunRow, ordinal: int) -> BatchRow | None:
    for batch in [one for one in run.batches if not one.leased and one.ordinal is None]:
        if not any(store.too_old(run, run.prompts[group_id].group, ordinal) for group_id in batch.group_ids):
            return batch
        take_apart(run, batch)
    return None


def _form(store: BufferStore, run: RunRow, ordinal: int) -> BatchRow | None:
    for row in run.training(State.READY):
        if store.too_old(run, row.group, ordinal):
            run.stats.groups_expired_total += 1
            row.group = None
            store.fail(run, row)
    ready = sorted(run.training(State.READY), key=lambda row: row.ready)[: run.opened.batch_groups]
    ended = store.exhausted(run) and not run.training(State.PENDING, State.LEASED)
    if not ready or (len(ready) < run.opened.batch_groups and not ended):
        return None
    batch = BatchRow(f"{run.run_id}/batch-{run.batch_counter}", [row.prompt.prompt_id for row in ready])
    run.batch_counter += 1
    run.batches.append(batch)
    for row in ready:
        row.state = State.BATCHED
    return batch


def take_apart(run: RunRow, batch: BatchRow) -> None:
    """Dissolves a batch; its groups wait again."""
    run.batches.remove(batch)
    for group_id in batch.group_ids:
        run.prompts[group_id].state = State.READY


def batch_of(run: RunRow, batch_id: str) -> BatchRow:
    """The batch of this id."""
    return next(batch for batch in run.batches if batch.batch_id == batch_id)


def index_of(group: sample_pb2.Group, attempt: int) -> pb.GroupIndex:
    """What is known of a group without its content."""
    index = group_index(group)
    index.prompt_id, index.attempt = group.prompt.prompt_id, attempt
    return index


def ack(store: BufferStore, run: RunRow, lease_id: str) -> pb.AckBatchResponse:
    """Takes note that a batch is contained in the weights."""
    lease = store.held(run, lease_id, True)
    batch = batch_of(run, lease.target)
    run.leases.pop(lease_id)
    batch.leased, batch.ordinal = False, run.trained
    for group_id in batch.group_ids:
        run.prompts[group_id].state = State.TRAINED
    run.trained += 1
    return pb.AckBatchResponse(trained=run.trained)


def nack(store: BufferStore, run: RunRow, request: pb.NackBatchRequest) -> pb.NackBatchResponse:
    """Takes a batch back; groups with a refused sample are thrown away and their prompts leased again."""
    lease = store.held(run, request.lease_id, True)
    batch = batch_of(run, lease.target)
    owner = {s.sample_id: group_id for group_id in batch.group_ids for s in group_samples(run.prompts[group_id].group)}
    for sample_id in request.refused_samples:
        if sample_id not in owner:
            raise ContractError(f"refused_samples[{sample_id!r}]", f"no such sample in batch {batch.batch_id!r}")
    store.end_lease(run, lease)
    refused = {owner[sample_id] for sample_id in request.refused_samples}
    if refused:
        take_apart(run, batch)
    for group_id in sorted(refused):
        run.prompts[group_id].group = None
        store.fail(run, run.prompts[group_id])
    return pb.NackBatchResponse()


def rewind(store: BufferStore, run: RunRow, request: pb.RewindRequest) -> pb.RewindResponse:
    """Makes batches acked after the checkpoint ready again, unless they hold a dead version."""
    if request.batch > run.trained:
        raise ContractError("batch", f"{request.batch} exceeds the {run.trained} acked batches of run {run.run_id!r}")
    if request.batch < run.collected:
        raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"batches before {run.collected} are collected")
    if request.lineage.HasField("forked_at") and request.lineage.forked_at != request.batch:
        raise ContractError("lineage.forked_at", f"must equal batch {request.batch}, got {request.lineage.forked_at}")
    run.tree.add(request.lineage)
    for lease in list(run.leases.values()):
        store.end_lease(run, lease)
    for batch in [one for one in run.batches if one.ordinal is not None and one.ordinal >= request.batch]:
        batch.ordinal = None
        for group_id in batch.group_ids:
            run.prompts[group_id].state = State.BATCHED
    expired = 0
    for row in run.training(State.READY, State.BATCHED):
        if all(run.tree.is_alive(v) for s in group_samples(row.group) for v, _ in segment_versions(s)):
            continue
        expired += 1
        for batch in [one for one in run.batches if row.prompt.prompt_id in one.group_ids]:
            take_apart(run, batch)
        row.state, row.group = State.PENDING, None
    run.stats.groups_expired_total += expired
    run.trained, run.version, run.rewind_due, run.closed = request.batch, None, False, False
    restored = sum(batch.ordinal is None for batch in run.batches)
    return pb.RewindResponse(batches_restored=restored, groups_expired=expired)


def collect(run: RunRow, oldest: int) -> None:
    """Forgets the content of batches that no restorable checkpoint needs."""
    for batch in [one for one in run.batches if one.ordinal is not None and one.ordinal < oldest]:
        run.batches.remove(batch)
        for group_id in batch.group_ids:
            run.prompts[group_id].group = None
    run.collected = max(run.collected, oldest)


def evaluation_result(store: BufferStore, run: RunRow, one: EvaluationRow) -> pb.GetEvaluationResultResponse:
    """The result so far. A failed rollout counts as reward 0."""
    rows = [run.prompts[prompt_id] for prompt_id in one.prompt_ids]
    answered = [row.group for row in rows if row.state is State.EVALUATED]
    overdue = store.clock() >= one.deadline
    one.done = one.done or overdue or all(row.state not in (State.PENDING, State.LEASED) for row in rows)
    if overdue:
        for row in rows:
            row.state = State.DROPPED if row.state in (State.PENDING, State.LEASED) else row.state
    rollouts = [rollout for group in answered for rollout in group.rollouts]
    failed = [r for r in rollouts if r.status == sample_pb2.ROLLOUT_STATUS_FAILED]
    scored = [r for r in rollouts if r.status != sample_pb2.ROLLOUT_STATUS_FAILED and r.HasField("reward")]
    response = pb.GetEvaluationResultResponse(
        done=one.done,
        prompts=len(rows),
        completed_prompts=len(answered),
        rollouts=len(rows) * one.rollouts,
        scored_rollouts=len(scored),
        failed_rollouts=len(failed),
        k=one.rollouts,
    )
    counted = len(scored) + len(failed)
    if counted:
        response.mean_reward = sum(r.reward for r in scored) / counted
        names = {name for r in scored for name in r.rewards}
        for name in names:
            response.mean_rewards[name] = sum(r.rewards.get(name, 0.0) for r in scored) / counted
    if answered:
        passed = sum(any(r.HasField("reward") and r.reward >= 1 for r in group.rollouts) for group in answered)
        response.pass_at_k = passed / len(answered)
    if scored:
        lengths = [sum(count for s in r.samples for _, count in segment_versions(s)) for r in scored]
        response.mean_response_tokens = sum(lengths) / len(lengths)
        response.truncated_share = sum(r.status == sample_pb2.ROLLOUT_STATUS_TRUNCATED for r in scored) / len(scored)
    seen = {(v.lineage, v.number): v for r in rollouts for s in r.samples for v, _ in segment_versions(s)}
    response.versions.extend(seen[key] for key in sorted(seen))
    return response
