"""The in-memory buffer's rules: prompts, leases, the staleness gate, commits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import StatusError
from vime_proto.fakes._buffer_rows import LeaseRow, PromptRow, RunRow, State
from vime_proto.sample.v1 import sample_pb2
from vime_proto.sample_views import group_samples, oldest_version, segment_versions
from vime_proto.version import policy_version, show


class BufferStore:
    """State of every run. Methods are synchronous and whole: each either happens or raises.

    Args:
        source: rows of the prompt source, in order; each pass over them is an epoch.
        evaluations: prompts by evaluation set.
        lease_ttl_seconds: how long a lease holds.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        source: Sequence[sample_pb2.Prompt] = (),
        evaluations: dict[str, Sequence[sample_pb2.Prompt]] | None = None,
        lease_ttl_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.source = source
        self.sets = evaluations or {}
        self.ttl = lease_ttl_seconds
        self.clock = clock
        self.runs: dict[str, RunRow] = {}
        self.blobs: dict[tuple[str, str], bytes] = {}

    def run(self, run_id: str) -> RunRow:
        """The run, with lapsed leases ended."""
        if run_id not in self.runs:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"run_id: no run {run_id!r}; call OpenRun first")
        run = self.runs[run_id]
        now = self.clock()
        for lease in [one for one in run.leases.values() if one.expires <= now]:
            run.stats.leases_lapsed_total += 1
            self.end_lease(run, lease)
        return run

    def ready_run(self, run_id: str) -> RunRow:
        """The run, unless a new lineage waits for its Rewind."""
        run = self.run(run_id)
        if run.rewind_due:
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION, f"run {run_id!r} opened a new lineage; call Rewind first"
            )
        return run

    # Leases ---------------------------------------------------------------------------------------------------

    def enter(self, run: RunRow, batch: bool, holder: str, incarnation: str) -> None:
        """Notes who asks: leases of an older incarnation end at once, and it gets no more."""
        if (batch, holder, incarnation) in run.retired:
            raise StatusError(
                grpc.StatusCode.ABORTED, f"incarnation {incarnation!r} of {holder!r} was replaced by a newer one"
            )
        known = run.incarnations.get((batch, holder))
        run.incarnations[batch, holder] = incarnation
        if known is None or known == incarnation:
            return
        run.retired.add((batch, holder, known))
        for lease in [one for one in run.leases.values() if one.batch == batch and one.holder == holder]:
            self.end_lease(run, lease)

    def grant(self, run: RunRow, target: str, batch: bool, holder: str, incarnation: str) -> LeaseRow:
        """Opens a lease."""
        number = run.version.number if run.version is not None else 0
        lease = LeaseRow(uuid.uuid4().hex, target, batch, holder, incarnation, self.clock() + self.ttl, number)
        run.leases[lease.lease_id] = lease
        return lease

    def held(self, run: RunRow, lease_id: str, batch: bool) -> LeaseRow:
        """An open lease.

        Raises:
            StatusError: ABORTED, when it ended, lapsed, was fenced or never was.
        """
        lease = run.leases.get(lease_id)
        if lease is None or lease.batch != batch:
            raise StatusError(grpc.StatusCode.ABORTED, f"lease_id {lease_id!r} is not held any more")
        return lease

    def end_lease(self, run: RunRow, lease: LeaseRow) -> None:
        """Ends a lease; its target is available again, at its old place."""
        run.leases.pop(lease.lease_id, None)
        if lease.batch:
            for batch in run.batches:
                batch.leased = batch.leased and batch.batch_id != lease.target
        elif run.prompts[lease.target].state is State.LEASED:
            run.prompts[lease.target].state = State.PENDING

    def renew(self, run: RunRow, lease_ids: Sequence[str]) -> list[int]:
        """A directive per lease; one whose answer would be too old ends here."""
        directives = []
        for lease_id in lease_ids:
            lease = run.leases.get(lease_id)
            go_on = lease is not None
            if go_on and not lease.batch and not run.prompts[lease.target].evaluation_id:
                go_on = run.trained - lease.granted_at <= run.opened.max_staleness
            if go_on:
                lease.expires = self.clock() + self.ttl
            elif lease is not None:
                run.stats.groups_expired_total += 1
                run.leases.pop(lease_id)
                self.fail(run, run.prompts[lease.target])
            directives.append(pb.LEASE_DIRECTIVE_CONTINUE if go_on else pb.LEASE_DIRECTIVE_ABORT)
        return directives

    # Prompts --------------------------------------------------------------------------------------------------

    def read_source(self, run: RunRow, wanted: int) -> None:
        """Fills the queue up to `wanted` waiting prompts."""
        while len(run.training(State.PENDING)) < wanted and not self.exhausted(run):
            epoch, row = divmod(run.position, len(self.source))
            prompt = sample_pb2.Prompt()
            prompt.CopyFrom(self.source[row])
            prompt.prompt_id = f"{self.source[row].prompt_id}@{epoch}"
            prompt.row, prompt.epoch = row, epoch
            run.prompts[prompt.prompt_id] = PromptRow(prompt)
            run.position += 1
            run.stats.prompts_read_total += 1

    def exhausted(self, run: RunRow) -> bool:
        """Whether the source has no more rows for this run."""
        return not self.source or (
            run.opened.HasField("epochs") and run.position >= run.opened.epochs * len(self.source)
        )

    def lease_prompts(self, run: RunRow, request: pb.LeasePromptsRequest) -> pb.LeasePromptsResponse:
        """Lends prompts: evaluations first, then training as far as the gate allows."""
        if run.closed:
            return pb.LeasePromptsResponse(outcome=pb.LEASE_OUTCOME_END_OF_DATA)
        self.enter(run, False, request.holder, request.incarnation)
        response = pb.LeasePromptsResponse(outcome=pb.LEASE_OUTCOME_EMPTY)
        asked = [row for row in run.prompts.values() if row.evaluation_id and row.state is State.PENDING]
        chosen = asked[: request.max_prompts]
        under_way = run.occupied()
        room = min(request.max_prompts - len(chosen), run.capacity())
        if room > 0:
            self.read_source(run, room)
            chosen += run.training(State.PENDING)[:room]
        for row in chosen:
            response.leases.append(self._lend(run, row, request, under_way))
            under_way += not row.evaluation_id
        if response.leases:
            response.outcome = pb.LEASE_OUTCOME_GRANTED
        elif self.exhausted(run) and not self.unfinished(run) and not self.sets:
            # With evaluation sets an evaluation may follow until CloseRun.
            response.outcome = pb.LEASE_OUTCOME_END_OF_DATA
        return response

    def unfinished(self, run: RunRow) -> bool:
        """Whether prompts or groups may still come back to the queue."""
        open_ones = any(
            row.evaluation_id and row.state in (State.PENDING, State.LEASED) for row in run.prompts.values()
        )
        return open_ones or bool(run.training(State.PENDING, State.LEASED, State.READY, State.BATCHED))

    def _lend(self, run: RunRow, row: PromptRow, request: pb.LeasePromptsRequest, under_way: int) -> pb.PromptLease:
        row.state = State.LEASED
        row.attempts += 1
        held = self.grant(run, row.prompt.prompt_id, False, request.holder, request.incarnation)
        held.attempt = row.attempts
        lease = pb.PromptLease(
            lease_id=held.lease_id,
            attempt=row.attempts,
            prompt=row.prompt,
            ttl_seconds=self.ttl,
            group_size=row.prompt.group_size or run.opened.group_size,
            purpose=pb.LEASE_PURPOSE_EVALUATE if row.evaluation_id else pb.LEASE_PURPOSE_TRAIN,
            evaluation_id=row.evaluation_id,
        )
        if row.evaluation_id:
            started = run.evaluations[row.evaluation_id].request
            lease.minimum_version.CopyFrom(started.version)
            if started.HasField("sampling"):
                lease.sampling.CopyFrom(started.sampling)
            return lease
        # Batches leave first in, first out: this group will be in batch trained + under_way // batch_groups.
        number = max(0, run.trained + under_way // run.opened.batch_groups - run.opened.max_staleness)
        lease.minimum_version.CopyFrom(policy_version(run.run_id, run.tree.current, number))
        lease.partial.extend(row.partial)
        return lease

    def fail(self, run: RunRow, row: PromptRow) -> bool:
        """Counts a failed attempt: the prompt waits again, or is dropped. Answers whether it was dropped."""
        row.failures += 1
        dropped = row.failures >= run.max_attempts
        row.state = State.DROPPED if dropped else State.PENDING
        run.stats.prompts_dropped_total += dropped
        return dropped

    # Groups ---------------------------------------------------------------------------------------------------

    def too_old(self, run: RunRow, group: sample_pb2.Group, ordinal: int) -> str:
        """Why a group may not train batch `ordinal`; empty when it may."""
        for sample in group_samples(group):
            for version, _ in segment_versions(sample):
                if not run.tree.is_alive(version):
                    return f"sample {sample.sample_id!r} holds the dead version {show(version)}"
        oldest = oldest_version(*group_samples(group))
        if oldest is not None and ordinal - oldest.number > run.opened.max_staleness:
            return (
                f"oldest version is {show(oldest)}; batch {ordinal} takes at least {ordinal - run.opened.max_staleness}"
            )
        return ""

    def commit(self, run: RunRow, lease: LeaseRow, group: sample_pb2.Group) -> pb.CommitGroupResponse:
        """Takes a valid group in; the lease ends whatever comes of it."""
        row = run.prompts[lease.target]
        run.leases.pop(lease.lease_id)
        for rollout in group.rollouts:
            if rollout.status == sample_pb2.ROLLOUT_STATUS_FAILED:
                run.stats.rollouts_failed_total[rollout.failure.stage] += 1
        if row.evaluation_id:
            row.state, row.group = State.EVALUATED, group
            return pb.CommitGroupResponse(outcome=pb.COMMIT_OUTCOME_EVALUATED)
        run.stats.groups_committed_total += 1
        reason = self.too_old(run, group, run.trained)
        if reason:
            run.stats.groups_expired_total += 1
            self.fail(run, row)
            return pb.CommitGroupResponse(outcome=pb.COMMIT_OUTCOME_EXPIRED, reason=reason)
        if all(rollout.status == sample_pb2.ROLLOUT_STATUS_FAILED for rollout in group.rollouts):
            dropped = self.fail(run, row)
            outcome = pb.COMMIT_OUTCOME_DROPPED if dropped else pb.COMMIT_OUTCOME_RETRY
            return pb.CommitGroupResponse(outcome=outcome, reason="every rollout failed")
        run.ready_counter += 1
        row.state, row.group, row.ready, row.partial = State.READY, group, run.ready_counter, []
        row.committed_attempt = lease.attempt
        return pb.CommitGroupResponse(outcome=pb.COMMIT_OUTCOME_READY)
