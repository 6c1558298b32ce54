"""One batch: from its columns to the last of its optimizer steps."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from vime_trainer.algorithms import RolloutBatch, get_algorithm, objective, token_weights
from vime_trainer.batch import BatchIndex, Columns, MicroBatch, build_micro_batch, plan_micro_batches, split_groups

from ._alarm import DifferenceAlarm
from ._backend import Backend
from ._figures import LogprobDifference, TokenFigures
from ._routes import Routes
from ._settings import RlSettings


class AlarmError(RuntimeError):
    """The log-prob difference left its band, and the configuration says to stop then."""


@dataclasses.dataclass
class BatchResult:
    """What training on a batch did.

    Attributes:
        figures: metrics by name.
        alarm: what the alarm said, or None.
    """

    figures: dict[str, float]
    alarm: str | None = None


class BatchTrainer:
    """Trains on batches, one after the other.

    Args:
        backend: the model.
        settings: of the run.
        pause_point: called between micro-batches; may raise to give the batch up.
    """

    def __init__(self, backend: Backend, settings: RlSettings, pause_point: Callable[[], None] = lambda: None):
        self._backend = backend
        self._settings = settings
        self._algorithm = get_algorithm(settings.algorithm.name)
        self._alarm = DifferenceAlarm(settings.alarm.factor, settings.alarm.floor)
        self._pause_point = pause_point

    def train(self, index: BatchIndex, columns: Columns, group_size: int, measure: bool = False) -> BatchResult:
        """Runs the batch's optimizer steps.

        A part of the batch without a trainable token takes no step and is counted; so is a step whose gradient is not
        finite.

        Args:
            index, columns: the batch.
            group_size: rollouts that a group was meant to have.
            measure: also measure the log-prob difference without replay and with shifted routes.

        Raises:
            RefusedSamplesError: samples whose routes cannot be replayed; nothing was trained.
            AlarmError: see `AlarmSettings`; nothing was trained.
        """
        settings = self._settings.algorithm
        batch = rollout_batch(index, columns, group_size)
        routes = Routes(columns, index.sample_ids) if self._settings.r3 == "replay" else None
        difference, figures = LogprobDifference(columns), TokenFigures()
        work = _Work(self._backend, columns, batch, routes, self._settings, self._pause_point)
        parts = split_groups(index.groups, self._settings.batch.optimizer_steps)
        logprobs = {"engine_logprobs": columns.engine_logprobs}
        alarm = None
        measured = len(parts) > 1 and settings.old_policy == "trainer"
        if measured:
            # Later steps need the policy as it was before the first.
            logprobs["old_logprobs"] = work.score(difference)
            alarm = self._check(difference)
        if settings.old_policy == "engine":
            logprobs["old_logprobs"] = columns.engine_logprobs
        if settings.kl.coefficient > 0:
            logprobs["reference_logprobs"] = work.score_reference()
        batch = dataclasses.replace(
            batch, logprobs={name.removesuffix("_logprobs"): values for name, values in logprobs.items()}
        )
        values = {**self._algorithm.advantage(batch, settings), **logprobs}
        extra = work.measure(difference) if measure and routes is not None else {}
        outcomes, losses, empty = [], [], 0
        for part in parts:
            weights = token_weights(batch, settings.aggregation, settings.constant_length, part)
            if not weights.any():
                empty += 1
                continue
            first = None if measured else difference
            losses.append(self._accumulate(work, values | {"weights": weights}, weights, figures, first))
            if first is not None:
                alarm = self._check(first)
                measured = True
            outcomes.append(work.step())
        result = {
            **figures.figures(),
            **difference.figures(),
            **extra,
            **(routes.figures() if routes is not None else {}),
            **work.figures(),
            **_outcome_figures(outcomes, losses, empty),
        }
        return BatchResult(result, alarm)

    def _accumulate(self, work: _Work, values, weights, figures, difference) -> float:
        self._backend.zero_grad()
        loss = 0.0
        for micro in work.micro_batches(weights != 0, values):
            outputs = work.forward(micro, count=difference is not None)
            work.tokens += micro.batch.total
            if difference is not None:
                difference.add(micro, outputs.logprobs)
            streams = micro.streams.to(outputs.logprobs.device)
            result = objective(self._algorithm, self._settings.algorithm, outputs.logprobs, outputs.entropy, streams)
            result.loss.backward()
            loss += float(result.loss.detach())
            figures.add(result.metrics, streams.mask)
            work.tick("forward_backward")
        return loss

    def _check(self, difference: LogprobDifference) -> str | None:
        alarm = self._alarm.check(difference.figures())
        if alarm is not None and self._settings.alarm.action == "fail":
            raise AlarmError(alarm)
        return alarm


class _Work:
    """Forward passes over one batch, and the time they take."""

    def __init__(self, backend, columns: Columns, batch: RolloutBatch, routes, settings: RlSettings, pause_point):
        self._backend = backend
        self._columns = columns
        self._batch = batch
        self._routes: Routes | None = routes
        self._settings = settings
        self._pause_point = pause_point
        self._seconds: dict[str, float] = {}
        self.tokens = 0
        self._last = time.monotonic()

    def micro_batches(self, mask: np.ndarray, values) -> list[MicroBatch]:
        """Those of the samples that have a token under the mask."""
        owner = np.repeat(np.arange(len(self._columns.lengths)), self._columns.lengths)
        samples = np.unique(owner[mask]).tolist()
        cut = self._settings.batch
        plan = plan_micro_batches(self._columns.lengths, samples, cut.token_budget, cut.layout)
        return [build_micro_batch(self._columns, chosen, mask, values) for chosen in plan]

    def forward(self, micro: MicroBatch, count: bool = False, replay: bool = True, shift: int = 0):
        self._pause_point()
        batch, rows = micro.batch, None
        if self._routes is not None and replay:
            rows = self._routes.rows_for(micro, shift, measure=count)
            batch = dataclasses.replace(batch, routes=rows)
        outputs = self._backend.forward(batch, micro.streams.mask)
        if count and rows is not None:
            self._routes.count(micro, rows, getattr(outputs, "usage", None))
        return outputs

    @torch.no_grad()
    def score(self, difference: LogprobDifference) -> np.ndarray:
        """float32 [T of the batch]: log-probs of every trainable token under the present weights."""
        result = np.zeros(len(self._columns.tokens), np.float32)
        for micro in self.micro_batches(self._batch.mask, {}):
            logprobs = self.forward(micro, count=True).logprobs
            difference.add(micro, logprobs)
            kept = micro.streams.mask.numpy()
            result[micro.rows[kept]] = logprobs.float().cpu().numpy()[kept]
        self.tick("old_logprobs")
        return result

    @torch.no_grad()
    def score_reference(self) -> np.ndarray:
        """As `score`, under the reference, which routes itself."""
        result = np.zeros(len(self._columns.tokens), np.float32)
        for micro in self.micro_batches(self._batch.mask, {}):
            self._pause_point()
            kept = micro.streams.mask
            logprobs = self._backend.reference_logprobs(micro.batch, kept)
            result[micro.rows[kept.numpy()]] = logprobs.float().cpu().numpy()[kept.numpy()]
        self.tick("reference")
        return result

    @torch.no_grad()
    def measure(self, difference: LogprobDifference) -> dict[str, float]:
        """The log-prob difference of one micro-batch with replay, without, and with every route one row too late."""
        plan = self.micro_batches(self._batch.mask, {})
        if not plan:
            return {}
        figures = {}
        ways = {"with_replay": {}, "without_replay": {"replay": False}, "shifted_routes": {"shift": 1}}
        for name, way in ways.items():
            mean = difference.mean_of(plan[0], self.forward(plan[0], **way).logprobs)
            if mean is not None:
                figures[f"logprob_abs_diff_{name}"] = mean
        self.tick("replay_check")
        return figures

    def step(self):
        outcome = self._backend.step()
        self.tick("optimizer")
        return outcome

    def tick(self, phase: str) -> None:
        """Adds the time since the last tick to a phase."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def figures(self) -> dict[str, float]:
        figures = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        return {**figures, "tokens": float(self.tokens)} if self.tokens else figures


def rollout_batch(index: BatchIndex, columns: Columns, group_size: int) -> RolloutBatch:
    """The batch as algorithms see it."""
    usable = np.repeat(index.usable[index.sample_rollouts], index.lengths)
    return RolloutBatch(
        rewards=index.rewards,
        groups=index.groups,
        usable=index.usable,
        truncated=index.truncated,
        sample_rollouts=index.sample_rollouts,
        lengths=index.lengths,
        mask=columns.trainable & usable,
        group_ids=index.group_ids,
        group_size=group_size,
    )


def _outcome_figures(outcomes, losses: list[float], empty: int) -> dict[str, float]:
    applied = [outcome for outcome in outcomes if outcome.applied]
    figures = {
        "optimizer_steps": float(len(applied)),
        "optimizer_steps/not_finite": float(len(outcomes) - len(applied)),
        "optimizer_steps/empty": float(empty),
    }
    if losses:
        figures["loss"] = float(np.mean(losses))
    norms = [outcome.grad_norm for outcome in outcomes if math.isfinite(outcome.grad_norm)]
    if norms:
        figures["grad_norm"] = max(norms)
    if outcomes:
        figures["learning_rate"] = outcomes[-1].learning_rate
        figures["grad_clipped_share"] = float(np.mean([outcome.clipped for outcome in outcomes]))
    return figures
