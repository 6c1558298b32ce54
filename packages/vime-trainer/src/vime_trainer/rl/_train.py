"""One batch: from its columns to the last of its optimizer steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from vime_trainer.algorithms import (
    RolloutBatch,
    advantage_streams,
    algorithm_of,
    correction_scale,
    proximal_alpha,
    required_columns,
    token_weights,
)
from vime_trainer.batch import BatchIndex, Columns
from vime_trainer.settings.rl import RlSettings

from ._alarm import DifferenceAlarm
from ._backend import Backend, StepOutcome
from ._figures import LogprobDifference, TokenFigures, explained_variance
from ._needed import NeededRoutes, ReplayedPass, needed_routes
from ._passes import Passes
from ._plan import MicroPlan, Plan, critic_steps, plan_batch
from ._recorded import RecordedRoutes
from ._routes import Routes
from ._team import Team


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
    """Trains on batches, one after the other. All ranks of a team do it together.

    Args:
        backend: the model.
        settings: of the run.
        pause_point: called between micro-batches of a process alone; may raise to give the batch up.
        team: the ranks; None for a process alone.
    """

    def __init__(
        self,
        backend: Backend,
        settings: RlSettings,
        pause_point: Callable[[], None] = lambda: None,
        team: Team | None = None,
    ):
        self._backend = backend
        self._settings = settings
        self._algorithm = algorithm_of(settings.algorithm)
        self._alarm = DifferenceAlarm(settings.alarm.factor, settings.alarm.floor)
        self._pause_point = pause_point
        self._team = team or Team()

    def train(
        self,
        index: BatchIndex,
        columns: Columns,
        group_size: int,
        measure: bool = False,
        plan: Plan | None = None,
        needed: NeededRoutes | None = None,
    ) -> BatchResult:
        """Runs the batch's optimizer steps.

        A part of the batch without a trainable token takes no step and is counted; so is a step whose gradient is not
        finite.

        Args:
            index, columns: the batch.
            group_size: rollouts that a group was meant to have.
            measure: also measure the log-prob difference without replay and with shifted routes.
            plan: how the batch is cut; derived from the index when absent.
            needed: what `needed_routes` answered for it; asked for when absent.

        Raises:
            RefusedSamplesError: samples whose routes cannot be replayed; nothing was trained.
            AlarmError: see `AlarmSettings`; nothing was trained.
        """
        settings, team, algorithm = self._settings.algorithm, self._team, self._algorithm
        plan = plan or plan_batch(index, self._settings.batch, team.data_size, cost=self._backend.cost)
        batch = rollout_batch(index, columns, group_size)
        routes = self._routes(index, columns, plan, needed or self.needed_routes(index, plan, measure))
        difference, figures = LogprobDifference(columns), TokenFigures()
        passes = Passes(self._backend, columns, batch.mask, plan, routes, team, self._pause_point)
        warming = self._warming(index)
        required = self._required(index, plan)
        batch = dataclasses.replace(batch, logprobs=self._logprobs(columns, passes, difference, required))
        if "values" in required:
            values, ends = passes.score_values(batch, "end_values" in required)
            batch = dataclasses.replace(batch, values=values, end_values=ends)
        measured = "old" in required and settings.old_policy != "engine"
        alarm = self._check(difference) if measured else None
        streams = self._streams(batch)
        extra = passes.measure(difference) if measure and self._settings.r3 == "replay" else {}
        policy, critic, empty = _Steps(), _Steps(), 0
        critic_figures = TokenFigures("critic")
        for step, part in enumerate(plan.parts):
            weights = token_weights(batch, settings.aggregation, settings.constant_length, part)
            if not weights.any():
                empty += 1
                continue
            own = streams | self._of_step(index, columns, batch, weights, step, len(plan.parts))
            if warming:
                continue
            first = None if measured else difference
            loss = passes.accumulate(step, weights, own, algorithm, settings, figures, first)
            if first is not None:
                alarm = self._check(first)
                measured = True
            policy.add(loss, passes.step())
        if algorithm.needs_critic:
            for weights, cut in self._critic_parts(index, batch, plan):
                loss = passes.accumulate_critic(cut, weights, streams, algorithm, settings, critic_figures)
                critic.add(loss, passes.step_critic())
        of_tokens = team.from_last_stage(
            lambda: {
                **figures.figures(team),
                **critic_figures.figures(team),
                **difference.figures(team),
                **(routes.figures(team) if routes is not None else {}),
            }
        )
        figures_of_steps = policy.figures("") | {"optimizer_steps/empty": float(empty)}
        if algorithm.needs_critic:
            figures_of_steps |= critic.figures("critic/")
            figures_of_steps |= explained_variance(streams["returns"], batch.values, batch.mask)
        return BatchResult({**of_tokens, **extra, **passes.figures(), **figures_of_steps}, alarm)

    def _critic_parts(
        self, index: BatchIndex, batch: RolloutBatch, plan: Plan
    ) -> Iterator[tuple[np.ndarray, MicroPlan]]:
        """Weights of tokens, and how it is cut, for each of the critic's optimizer steps that has something to learn."""
        settings, critic = self._settings.algorithm, self._settings.critic
        parts = critic_steps(index, plan, self._settings.batch, critic.optimizer_steps, self._backend.cost)
        weighted = [
            (token_weights(batch, settings.aggregation, settings.constant_length, part), cut) for part, cut in parts
        ]
        for _ in range(critic.epochs):
            yield from ((weights, cut) for weights, cut in weighted if weights.any())

    def _streams(self, batch: RolloutBatch) -> dict[str, np.ndarray]:
        """What the loss sees, float32 [T] each."""
        streams = advantage_streams(self._algorithm, batch, self._settings.algorithm)
        streams |= {f"{name}_logprobs": values for name, values in batch.logprobs.items()}
        return streams if batch.values is None else streams | {"values": batch.values}

    def needed_routes(self, index: BatchIndex, plan: Plan, measure: bool) -> NeededRoutes | None:
        """Which of the engine's routes this rank is going to replay; None when it replays none. All ranks call this."""
        if self._settings.r3 != "replay":
            return None
        rank = self._team.data_rank
        passes = [] if self._warming(index) else [ReplayedPass(step[rank]) for step in plan.steps]
        if "old" in self._required(index, plan) and self._settings.algorithm.old_policy != "engine":
            passes.append(ReplayedPass(plan.whole[rank]))
        if measure:
            passes += [ReplayedPass(plan.whole[rank][:1]), ReplayedPass(plan.whole[rank][:1], shift=1)]
        return needed_routes(index.lengths, self._backend, passes)

    def _warming(self, index: BatchIndex) -> bool:
        """Whether the critic alone learns from a batch."""
        return self._algorithm.needs_critic and index.ordinal < self._settings.critic.warmup_batches

    def _required(self, index: BatchIndex, plan: Plan) -> frozenset[str]:
        required = required_columns(self._algorithm, self._settings.algorithm, len(plan.parts))
        return required | ({"old"} if self._warming(index) else set())

    def _logprobs(self, columns: Columns, passes: Passes, difference, needed: frozenset[str]) -> dict[str, np.ndarray]:
        """What `advantage` and the loss see of other policies than the live one."""
        logprobs = {"engine": columns.engine_logprobs}
        # Where nobody needs the old policy early, the loss's own forward pass of the first step has it.
        if self._settings.algorithm.old_policy == "engine":
            logprobs["old"] = columns.engine_logprobs
        elif "old" in needed:
            logprobs["old"] = passes.score(difference)
        if "reference" in needed:
            logprobs["reference"] = passes.score_reference()
        if "teacher" in needed:
            logprobs["teacher"] = columns.teacher_logprobs
        return logprobs

    def _of_step(
        self, index: BatchIndex, columns: Columns, batch: RolloutBatch, weights: np.ndarray, step: int, steps: int
    ) -> dict[str, np.ndarray]:
        """Streams that differ between the optimizer steps of a batch."""
        settings, streams = self._settings.algorithm, {}
        if settings.old_policy == "linear":
            now = index.ordinal + step / steps
            streams["proximal_alpha"] = proximal_alpha(columns.versions, index.ordinal, now)
        if settings.correction_normalise:
            streams["correction_scale"] = correction_scale(batch, settings, weights != 0)
        return streams

    def _routes(
        self, index: BatchIndex, columns: Columns, plan: Plan, needed: NeededRoutes | None
    ) -> Routes | RecordedRoutes | None:
        if self._settings.r3 == "off":
            return None
        if self._settings.r3 == "record":
            return RecordedRoutes(columns)
        with self._team.settled():
            mine = plan.owned[self._team.data_rank]
            return Routes(columns, index.sample_ids, mine, needed)

    def _check(self, difference: LogprobDifference) -> str | None:
        # The same figures, and so the same answer, on every rank.
        alarm = self._alarm.check(self._team.from_last_stage(lambda: difference.figures(self._team)))
        if alarm is not None and self._settings.alarm.action == "fail":
            raise AlarmError(alarm)
        return alarm


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


class _Steps:
    """Optimizer steps of a batch."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._outcomes: list[StepOutcome] = []

    def add(self, loss: float, outcome: StepOutcome) -> None:
        """One more."""
        self._losses.append(loss)
        self._outcomes.append(outcome)

    def figures(self, prefix: str) -> dict[str, float]:
        """Steps taken and not taken; what was not measured is absent."""
        outcomes = self._outcomes
        applied = sum(outcome.applied for outcome in outcomes)
        figures = {"optimizer_steps": float(applied), "optimizer_steps/not_finite": float(len(outcomes) - applied)}
        if outcomes:
            figures["loss"] = float(np.mean(self._losses))
            figures["learning_rate"] = outcomes[-1].learning_rate
            figures["grad_clipped_share"] = float(np.mean([outcome.clipped for outcome in outcomes]))
        norms = [outcome.grad_norm for outcome in outcomes if math.isfinite(outcome.grad_norm)]
        if norms:
            figures["grad_norm"] = max(norms)
        return {f"{prefix}{name}": value for name, value in figures.items()}
