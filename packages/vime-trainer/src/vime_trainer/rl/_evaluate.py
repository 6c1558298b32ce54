"""Evaluations: when they are due, and what their results say."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2 as common
from vime_trainer.settings.rl import EvaluationSettings

from ._buffer import BufferClient
from ._io import IoThread

log = logging.getLogger(__name__)

_POLL_SECONDS = 10.0


def due(settings: EvaluationSettings, step: int, first: bool, last: bool) -> bool:
    """Whether a set is evaluated now.

    Args:
        step: batches trained.
        first: this process has trained none yet, whatever the step that it resumed at.
        last: nothing follows.
    """
    if first:
        return settings.at_start
    if last and settings.at_end:
        return True
    return settings.interval is not None and step % settings.interval == 0


def figures_of(name: str, result: pb.GetEvaluationResultResponse) -> dict[str, float]:
    """Metrics "eval/<set>/...". Figures that the result lacks are absent."""
    prefix = f"eval/{name}"
    figures = {f"{prefix}/failed_rollouts": float(result.failed_rollouts)}
    if result.rollouts:
        covered = result.scored_rollouts + result.failed_rollouts
        figures[f"{prefix}/coverage"] = covered / result.rollouts
    for field, key in {
        "mean_reward": "reward_mean",
        "pass_at_k": f"pass_at_{result.k}",
        "mean_response_tokens": "response_tokens/mean",
        "truncated_share": "truncated_share",
    }.items():
        if result.HasField(field):
            figures[f"{prefix}/{key}"] = getattr(result, field)
    figures |= {f"{prefix}/reward/{reward}": value for reward, value in result.mean_rewards.items()}
    figures[f"{prefix}/versions"] = float(len(result.versions))
    return figures


@dataclass
class _Open:
    name: str
    step: int
    started: float
    result: concurrent.futures.Future[pb.GetEvaluationResultResponse]


class Evaluations:
    """Starts evaluations and reports their results.

    Args:
        settings: the sets.
        buffer, io: who answers, and where calls are made.
        report: called on the training thread with the step evaluated and its figures.
    """

    def __init__(
        self,
        settings: list[EvaluationSettings],
        buffer: BufferClient,
        io: IoThread,
        report: Callable[[int, dict[str, float]], None],
    ):
        self._settings = settings
        self._buffer = buffer
        self._io = io
        self._report = report
        self._open: list[_Open] = []
        self._evaluated: dict[str, common.PolicyVersion] = {}

    def due(self, step: int, first: bool = False, last: bool = False) -> bool:
        """Whether any set is evaluated now."""
        return any(due(one, step, first, last) for one in self._settings)

    def run(self, step: int, version: common.PolicyVersion, first: bool = False, last: bool = False) -> None:
        """Starts what is due, and waits for those that say so; for all of them at the end.

        At the end nothing is evaluated again that was evaluated with these very weights.
        """
        waited = []
        for one in self._settings:
            if not due(one, step, first, last) or (last and self._evaluated.get(one.set) == version):
                continue
            self._evaluated[one.set] = version
            request = pb.StartEvaluationRequest(
                set=one.set,
                version=version,
                deadline_seconds=one.deadline_seconds,
                rollouts_per_prompt=one.rollouts_per_prompt,
                max_prompts=one.max_prompts,
            )
            started = self._buffer.start_evaluation(request)
            future = self._io.spawn(self._wait(started.evaluation_id))
            self._open.append(_Open(one.set, step, time.monotonic(), future))
            if one.wait or last:
                waited.append(future)
        for future in waited:
            self._io.run(_settled(future))
        self.collect(everything=last)

    def collect(self, everything: bool = False) -> None:
        """Reports results that have come; with `everything`, waits for the rest."""
        for one in list(self._open):
            if everything:
                self._io.run(_settled(one.result))
            if one.result.done():
                self._open.remove(one)
                seconds = time.monotonic() - one.started
                figures = figures_of(one.name, one.result.result())
                self._report(one.step, {**figures, f"eval/{one.name}/seconds": seconds})

    async def _wait(self, evaluation_id: str) -> pb.GetEvaluationResultResponse:
        while True:
            result = await self._buffer.evaluation_result(evaluation_id, _POLL_SECONDS)
            if result.done:
                return result


async def _settled(future: concurrent.futures.Future) -> None:
    import asyncio

    # The future's own exception is read where its result is.
    await asyncio.wait([asyncio.wrap_future(future)])
