"""One lease from prompt to scored group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker._errors import RolloutError
from vime_rollout.worker._prompt import Prepared, Preparer
from vime_rollout.worker._rollout import Outcome, RolloutRunner
from vime_rollout.worker._score import Scorer, build_rollout
from vime_rollout.worker._trajectory import Trajectory

log = logging.getLogger(__name__)


class GroupRun:
    """The work on one lease.

    Args:
        lease: as the buffer gave it.
        resumable: whether partial rollouts can be continued (single turn alone: an environment's state is gone).
    """

    def __init__(
        self, lease: buffer_pb2.PromptLease, prepare: Preparer, runner: RolloutRunner, scorer: Scorer, resumable: bool
    ):
        self.lease = lease
        self._prepare, self._runner, self._scorer = prepare, runner, scorer
        self._resumable = resumable
        self._prepared: Prepared | None = None
        self._outcomes: list[Outcome] = []

    async def run(self) -> pb.Group:
        """Generates and scores. Rollouts that fail are in the group as such."""
        lease = self.lease
        count = max(1, lease.group_size)
        try:
            prepared = self._prepare(lease)
        except RolloutError as error:
            return self._group([self._failed(index, error) for index in range(count)])
        self._prepared = prepared
        self._outcomes = [self._outcome(prepared, index) for index in range(count)]
        running = [one for one in self._outcomes if one.status == pb.ROLLOUT_STATUS_ABORTED]
        async with asyncio.TaskGroup() as group:
            for outcome in running:
                group.create_task(self._runner.run(prepared, outcome))
        return self._group(await self._scorer.rollouts(prepared, self._outcomes))

    def partial(self) -> list[pb.Rollout]:
        """What there is of the rollouts, for another attempt; empty when it could not use it."""
        if self._prepared is None or not self._resumable:
            return []
        return [
            build_rollout(self._prepared, outcome)
            for outcome in self._outcomes
            if outcome.error is None and outcome.trajectories and outcome.trajectories[-1].model_tokens
        ]

    def _outcome(self, prepared: Prepared, index: int) -> Outcome:
        outcome = Outcome(index)
        if not self._resumable or index >= len(self.lease.partial):
            return outcome
        earlier = self.lease.partial[index]
        if len(earlier.samples) != 1 or earlier.samples[0].segments[0].token_ids.data != prepared.ids.tobytes():
            return outcome
        sample = earlier.samples[0]
        if any(one.role != pb.SEGMENT_ROLE_MODEL for one in sample.segments[1:]):
            return outcome
        trajectory = Trajectory(prepared.ids)
        trajectory.add_segments(sample.segments[1:])
        if sample.HasField("routing"):
            trajectory.routing = sample.routing
        outcome.trajectories.append(trajectory)
        if earlier.status in (pb.ROLLOUT_STATUS_COMPLETED, pb.ROLLOUT_STATUS_TRUNCATED):
            outcome.status = earlier.status
        return outcome

    def _failed(self, index: int, error: RolloutError) -> pb.Rollout:
        return pb.Rollout(
            rollout_id=f"{self.lease.lease_id}:{index}",
            attempt=self.lease.attempt,
            status=pb.ROLLOUT_STATUS_FAILED,
            failure=error.failure(),
        )

    def _group(self, rollouts: Sequence[pb.Rollout]) -> pb.Group:
        prompt = self.lease.prompt
        return pb.Group(group_id=prompt.prompt_id, prompt=prompt, rollouts=rollouts)
