"""The metrics of a run: what the trainer streams, kept in a file, and the figures that the launcher shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc

from vime_proto.channel import LOST, open_channel
from vime_proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc

# What the launcher shows, and the trainer's name of it.
REWARD = "reward/mean"
LOGPROB_DIFF = "train_rollout_logprob_abs_diff/mean"
STALENESS = "staleness/mean"
STALENESS_MAX = "staleness/max"
TOKENS_PER_SECOND = "tokens_per_second"
SECONDS = "seconds/"
# A step's own time, which the other entries under SECONDS are parts of.
STEP_SECONDS = "seconds/step"
WITH_REPLAY = "logprob_abs_diff_with_replay"
WITHOUT_REPLAY = "logprob_abs_diff_without_replay"
SHIFTED_ROUTES = "logprob_abs_diff_shifted_routes"
ROWS_REPLAYED = "r3/rows_replayed"
ROWS_FLIPPED = "r3/rows_flipped"
EVALUATION = "eval/"
# Ends the name of an evaluation's mean reward; with a reward of 0 or 1 that is the accuracy.
ACCURACY = "/reward_mean"

Row = dict[str, float]


class Metrics:
    """Values by step. A later value of a step replaces an earlier one: after a resume the kept lineage counts."""

    def __init__(self, path: Path | None = None):
        self.rows: dict[int, Row] = {}
        self._path = path
        if path is not None and path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                # A launcher that was killed while it wrote left half a line.
                path.write_text(whole)
            for line in whole.splitlines():
                row = json.loads(line)
                self._take(row["step"], row["values"])

    def _take(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(values)

    def add(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Takes the values of a step and appends them to the file."""
        self._take(step, values)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "time": time, "values": dict(values)}) + "\n")

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps that have a value of this name, ascending, and their values."""
        steps = sorted(step for step, row in self.rows.items() if name in row)
        return steps, [self.rows[step][name] for step in steps]

    def names(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix``, over all steps."""
        return sorted({name for row in self.rows.values() for name in row if name.startswith(prefix)})

    def accuracy(self) -> tuple[str, list[int], list[float]]:
        """The first evaluation's mean reward: its name, steps and values; empty without any."""
        for name in self.names(EVALUATION):
            if name.endswith(ACCURACY):
                return name, *self.series(name)
        return "", [], []


async def follow(address: str, metrics: Metrics, seen: Callable[[int, Row], None], from_step: int = 0) -> None:
    """Takes the metrics that the trainer streams until the stream ends with the trainer."""
    next_step = from_step
    async with open_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        while True:
            try:
                async for message in stub.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=next_step)):
                    one = message.metrics
                    metrics.add(one.step, one.time, one.values)
                    # An evaluation after this step still comes under its number.
                    next_step = one.step
                    seen(one.step, metrics.rows[one.step])
                return
            except grpc.RpcError as error:
                if error.code() not in LOST:
                    raise
            # The trainer is gone, and its watch says why, or the connection broke and comes back.
            await asyncio.sleep(0.5)
