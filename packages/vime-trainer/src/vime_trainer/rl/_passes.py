"""The model's passes over one batch, on this rank, and the time that they take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vime_trainer.algorithms import Algorithm, AlgorithmSettings, RolloutBatch, Streams, critic_objective, objective
from vime_trainer.batch import Columns, MicroBatch, build_micro_batch
from vime_trainer.packed import PackedBatch, ReplayRows, TokenOutputs
from vime_trainer.value import ValueOutputs

from ._backend import Backend, StepOutcome
from ._figures import LogprobDifference, TokenFigures
from ._plan import MicroPlan, Plan
from ._recorded import RecordedRoutes
from ._routes import Routes
from ._share import rows_of
from ._team import Team
from ._values import truncated_ends


class Passes:
    """Scores a batch and sums up gradients. All ranks make the same passes.

    Args:
        backend: the model.
        columns: the batch; tokens of other data ranks' samples are not looked at.
        mask: bool [T of the batch], tokens that count.
        plan: how it is cut.
        routes: of the engine or of the old policy, of this rank's samples; None when the model routes itself.
        team: the ranks.
        pause_point: called between micro-batches of a process alone; may raise to give the batch up.
    """

    def __init__(
        self,
        backend: Backend,
        columns: Columns,
        mask: np.ndarray,
        plan: Plan,
        routes: Routes | RecordedRoutes | None,
        team: Team,
        pause_point: Callable[[], None],
    ):
        self._backend = backend
        self._columns = columns
        self._mask = mask
        self._plan = plan
        self._routes = routes
        self._team = team
        self._pause_point = pause_point
        self._seconds: dict[str, float] = {}
        self._tokens = 0
        self._last = time.monotonic()

    def score(self, difference: LogprobDifference) -> np.ndarray:
        """float32 [T of the batch]: log-probs of every trainable token under the present weights.

        Where the old policy's routes are to be replayed, this is the pass that records them.
        """
        micros = self._micro_batches(self._plan.whole, self._mask, {})
        if isinstance(self._routes, RecordedRoutes):
            self._routes.start()
        outputs = self._forward(micros, count=True)
        if isinstance(self._routes, RecordedRoutes) and micros:
            self._routes.keep(micros, self._backend.recorded)
        for micro, output in zip(micros, outputs, strict=False):
            difference.add(micro, output.logprobs)
        result = self._column(micros, [output.logprobs for output in outputs])
        self.tick("old_logprobs")
        return result

    def score_reference(self) -> np.ndarray:
        """As `score`, under the reference, which routes itself."""
        return self._score_by(self._backend.run_reference, "logprobs", "reference")

    def score_values(self, batch: RolloutBatch, ends: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """float32 [T of the batch]: the critic's value of the prefix before every trainable token.

        With `ends` also float32 [R], its value of all that a truncated rollout has; 0 for other rollouts.
        """
        run = self._backend.critic.run
        if not ends:
            return self._score_by(run, "values", "values"), None
        longer = truncated_ends(self._columns, batch)
        found = self._score_by(run, "values", "values", longer.columns, longer.mask)
        return longer.split(found, len(batch.rewards))

    def _score_by(
        self,
        run: Callable[..., list[Any]],
        output: str,
        phase: str,
        columns: Columns | None = None,
        mask: np.ndarray | None = None,
    ) -> np.ndarray:
        """Of the batch, or of `columns` that have the same samples."""
        columns, mask = (self._columns, self._mask) if columns is None else (columns, mask)
        micros = self._micro_batches(self._plan.whole, mask, {}, columns)
        outputs: list[Any] = []
        if micros:
            self._pause()
            outputs = run([m.batch for m in micros], [m.streams.mask for m in micros])
        result = self._column(micros, [getattr(one, output) for one in outputs], columns)
        self.tick(phase)
        return result

    def measure(self, difference: LogprobDifference) -> dict[str, float]:
        """The log-prob difference of one micro-batch of each data rank: with replay, without, and with every route one
        row too late."""
        micros = self._micro_batches(self._plan.whole, self._mask, {})[:1]
        if not micros:
            return {}
        figures = {}
        ways = {"with_replay": {}, "without_replay": {"replay": False}, "shifted_routes": {"shift": 1}}
        for name, way in ways.items():
            outputs = self._forward(micros, **way)

            def mean(outputs=outputs) -> float | None:
                return difference.mean_of(micros[0], outputs[0].logprobs, self._team)

            found = self._team.from_last_stage(mean)
            if found is not None:
                figures[f"logprob_abs_diff_{name}"] = found
        self.tick("replay_check")
        return figures

    def accumulate(
        self,
        step: int,
        weights: np.ndarray,
        values: Mapping[str, np.ndarray],
        algorithm: Algorithm,
        settings: AlgorithmSettings,
        figures: TokenFigures,
        difference: LogprobDifference | None,
    ) -> float:
        """Adds up the gradient of one optimizer step; its loss.

        Args:
            step: which one.
            weights: float32 [T of the batch], see `token_weights`; 0 at tokens that do not take part.
            values: streams of the whole batch, float32 [T of the batch] each.
            algorithm, settings: what is differentiated.
            figures: collects values of tokens.
            difference: collects differences of log-probs, if these were not measured before.
        """
        micros = self._micro_batches(self._plan.steps[step], weights != 0, {**values, "weights": weights})
        losses: list[torch.Tensor] = []

        def loss(i: int, outputs: TokenOutputs) -> torch.Tensor:
            if self._team.size == 1:
                self._pause_point()
            micro = micros[i]
            if difference is not None:
                difference.add(micro, outputs.logprobs)
            streams = micro.streams.to(outputs.logprobs.device)
            result = objective(algorithm, settings, outputs.logprobs, outputs.entropy, streams)
            losses.append(result.loss.detach())
            figures.add(result.metrics, streams.mask)
            return result.loss

        self._backend.zero_grad()
        # The engine's routes are counted once a batch, the old policy's wherever they are replayed.
        count = difference is not None or isinstance(self._routes, RecordedRoutes)
        batches = self._batches(micros, count)
        self._pause()
        outputs = self._backend.run(batches, [micro.streams.mask for micro in micros], loss)
        if count:
            self._count_all(micros, batches, outputs)
        self._tokens += sum(micro.batch.total for micro in micros if micro.samples)
        total = self._team.from_last_stage(lambda: self._team.total(sum(float(one) for one in losses)))
        self.tick("forward_backward")
        return total

    def accumulate_critic(
        self,
        cut: MicroPlan,
        weights: np.ndarray,
        values: Mapping[str, np.ndarray],
        algorithm: Algorithm,
        settings: AlgorithmSettings,
        figures: TokenFigures,
    ) -> float:
        """As `accumulate`, for the critic, over these micro-batches."""
        micros = self._micro_batches(cut, weights != 0, {**values, "weights": weights})
        losses: list[torch.Tensor] = []

        def loss(i: int, outputs: ValueOutputs) -> torch.Tensor:
            streams = micros[i].streams.to(outputs.values.device)
            result = critic_objective(algorithm, settings, outputs.values, streams)
            losses.append(result.loss.detach())
            figures.add(result.metrics, streams.mask)
            return result.loss

        self._backend.critic.zero_grad()
        self._pause()
        self._backend.critic.run([m.batch for m in micros], [m.streams.mask for m in micros], loss)
        total = self._team.from_last_stage(lambda: self._team.total(sum(float(one) for one in losses)))
        self.tick("critic")
        return total

    def step(self) -> StepOutcome:
        """The optimizer's step."""
        outcome = self._backend.step()
        self.tick("optimizer")
        return outcome

    def step_critic(self) -> StepOutcome:
        """That of the critic's optimizer."""
        outcome = self._backend.critic.step()
        self.tick("critic")
        return outcome

    def tick(self, phase: str) -> None:
        """Adds the time since the last tick to a phase."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def figures(self) -> dict[str, float]:
        """Seconds of this rank's phases, and tokens that went forward and back on all."""
        figures = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        tokens = self._team.total(self._tokens)
        return {**figures, "tokens": float(tokens)} if tokens else figures

    # ---------------------------------------------------------------------------------------------------------------

    def _micro_batches(
        self, plan: MicroPlan, mask: np.ndarray, values, columns: Columns | None = None
    ) -> list[MicroBatch]:
        mine, columns = plan[self._team.data_rank], columns or self._columns
        return [
            build_micro_batch(columns, chosen, mask, values) if chosen else empty_micro_batch(values) for chosen in mine
        ]

    def _forward(
        self, micros: list[MicroBatch], count: bool = False, replay: bool = True, shift: int = 0
    ) -> list[TokenOutputs]:
        batches = self._batches(micros, count, replay, shift)
        if not batches:
            return []
        self._pause()
        outputs = self._backend.run(batches, [micro.streams.mask for micro in micros])
        if count:
            self._count_all(micros, batches, outputs)
        return outputs

    def _batches(
        self, micros: list[MicroBatch], count: bool = False, replay: bool = True, shift: int = 0
    ) -> list[PackedBatch]:
        if self._routes is None or not replay:
            return [micro.batch for micro in micros]
        return [
            dataclasses.replace(micro.batch, routes=self._routes.rows_for(micro, shift, measure=count))
            if micro.samples
            else micro.batch
            for micro in micros
        ]

    def _count_all(self, micros: list[MicroBatch], batches: list[PackedBatch], outputs: list[TokenOutputs]) -> None:
        for micro, batch, output in zip(micros, batches, outputs, strict=False):
            if self._routes is not None and isinstance(batch.routes, ReplayRows):
                self._routes.count(micro, output.usage)

    def _column(
        self, micros: list[MicroBatch], outputs: list[torch.Tensor], columns: Columns | None = None
    ) -> np.ndarray:
        """What the last stages of all data ranks say of their tokens, as one column of the batch."""
        columns = columns or self._columns
        column = np.zeros(len(columns.tokens), np.float32)
        for micro, values in zip(micros, outputs, strict=False):
            kept = micro.streams.mask.numpy()
            column[micro.rows[kept]] = values.float().cpu().numpy()[kept]
        if self._team.size > 1:
            places = [rows_of(columns.starts, columns.lengths, owned) for owned in self._plan.owned]
            mine = self._team.column_of_last_stage(column[places[self._team.data_rank]])
            for rows, values in zip(places, self._team.gather(mine), strict=True):
                column[rows] = values
        return column

    def _pause(self) -> None:
        if self._team.size > 1:
            self._team.pause()
        else:
            self._pause_point()


def empty_micro_batch(values: Mapping[str, np.ndarray]) -> MicroBatch:
    """One token that does not count, for a rank that has fewer micro-batches than another."""
    batch = PackedBatch(
        tokens=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        temperature=torch.ones(1),
    )
    streams = Streams(
        mask=torch.zeros(1, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1]),
        values={name: torch.zeros(1) for name in values},
    )
    return MicroBatch(batch, streams, (), np.zeros(1, np.int64))
