"""The figures of a demo run, and what they have to be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vime_launch.metrics import (
    LOGPROB_DIFF,
    ROWS_FLIPPED,
    ROWS_REPLAYED,
    SHIFTED_ROUTES,
    STALENESS_MAX,
    WITH_REPLAY,
    WITHOUT_REPLAY,
    Metrics,
)

RISE = 0.30
FINAL = 0.85
DIFFERENCE = 1e-5
SHIFT_FACTOR = 1000.0
# With kernels of less precision than float32 the difference is larger, and what a wrong route does is not.
COARSE_SHIFT_FACTOR = 100.0


@dataclass(frozen=True)
class Figures:
    """What a demo run measured. None: not measured.

    Attributes:
        sft_accuracy, final_accuracy: share of held-out sums answered right, greedily, by the engine: before the first
            step of reinforcement learning and after the last.
        logprob_abs_diff_max: the largest per-step mean of ``|trainer - engine|`` per token, in nats.
        logprob_abs_diff_with_replay, logprob_abs_diff_without_replay, logprob_abs_diff_shifted_routes: the same on one
            micro-batch, with the engine's routes, with the trainer's own, and with every route one row too late; means
            over the steps that measured all three.
        rows_replayed, rows_flipped: tokens whose routes were replayed, and those of them that the trainer alone would
            have routed otherwise.
        staleness_max: batches that a sample lagged behind the weights that it trained, at most.
        steps: batches trained.
    """

    sft_accuracy: float | None
    final_accuracy: float | None
    logprob_abs_diff_max: float | None
    logprob_abs_diff_with_replay: float | None
    logprob_abs_diff_without_replay: float | None
    logprob_abs_diff_shifted_routes: float | None
    rows_replayed: int | None
    rows_flipped: int | None
    staleness_max: float | None
    steps: int

    def asdict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def figures_of(metrics: Metrics) -> Figures:
    """The figures of a run's metrics."""

    def mean(name: str) -> float | None:
        values = metrics.series(name)[1]
        return sum(values) / len(values) if values else None

    def largest(name: str) -> float | None:
        return max(metrics.series(name)[1], default=None)

    def total(name: str) -> int | None:
        values = metrics.series(name)[1]
        return int(sum(values)) if values else None

    _, evaluated, accuracy = metrics.accuracy()
    trained = metrics.series(LOGPROB_DIFF)[0]
    return Figures(
        sft_accuracy=accuracy[0] if evaluated and evaluated[0] == 0 else None,
        final_accuracy=accuracy[-1] if evaluated and trained and evaluated[-1] == trained[-1] else None,
        logprob_abs_diff_max=largest(LOGPROB_DIFF),
        logprob_abs_diff_with_replay=mean(WITH_REPLAY),
        logprob_abs_diff_without_replay=mean(WITHOUT_REPLAY),
        logprob_abs_diff_shifted_routes=mean(SHIFTED_ROUTES),
        rows_replayed=total(ROWS_REPLAYED),
        rows_flipped=total(ROWS_FLIPPED),
        staleness_max=largest(STALENESS_MAX),
        steps=trained[-1] if trained else 0,
    )


def faults(figures: Figures, max_staleness: int, learns: bool = True, difference: float = DIFFERENCE) -> list[str]:
    """What the figures fall short of, one line each; empty when all is well.

    Args:
        figures: of one run.
        max_staleness: the run's bound; at 0 trainer and engine must agree on every token.
        learns: whether the run was long enough for accuracy to count.
        difference: bound of the mean log-prob difference at ``max_staleness`` 0, in nats.
    """
    found = [f"{name} was not measured" for name, value in asdict(figures).items() if value is None]
    sft, final = figures.sft_accuracy, figures.final_accuracy
    if learns and sft is not None and final is not None:
        if final - sft < RISE:
            found.append(f"held-out accuracy rose by {final - sft:.3f}, less than {RISE}")
        if final <= FINAL:
            found.append(f"held-out accuracy ends at {final:.3f}, not above {FINAL}")
    largest, shifted = figures.logprob_abs_diff_max, figures.logprob_abs_diff_shifted_routes
    factor = SHIFT_FACTOR if difference <= DIFFERENCE else COARSE_SHIFT_FACTOR
    if max_staleness == 0 and largest is not None:
        if largest >= difference:
            found.append(f"the mean log-prob difference reached {largest:.2e}, not below {difference:.0e}")
        if shifted is not None and shifted < factor * largest:
            found.append(f"routes shifted by a row give {shifted:.2e}, less than {factor:.0f} times {largest:.2e}")
    if figures.rows_replayed == 0:
        found.append("no row was replayed")
    if figures.staleness_max is not None and figures.staleness_max > max_staleness:
        found.append(f"a sample lagged {figures.staleness_max:.0f} batches behind; at most {max_staleness} were allowed")
    if max_staleness and figures.staleness_max == 0:
        found.append("no sample lagged behind, though the run allows it")
    return found
