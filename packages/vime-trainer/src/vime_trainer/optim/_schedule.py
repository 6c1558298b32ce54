"""The learning rate as a pure function of the number of the update, so that a resumed run cannot differ."""

from __future__ import annotations

import math

from vime_trainer.settings.optimizer import OptimizerSettings

__all__ = ["check_span", "learning_rate"]


def check_span(settings: OptimizerSettings, total: int | None) -> None:
    """Checks that a schedule fits the updates of a run.

    Raises:
        ValueError: a schedule that needs the number of updates and has none, or a warm-up and decay beyond it.
    """
    if settings.schedule == "constant":
        return
    if total is None:
        raise ValueError(f"optimizer.total_updates: schedule {settings.schedule!r} needs it when the run has no end")
    used = settings.warmup_updates + (settings.decay_updates or 0)
    if used > total:
        raise ValueError(f"optimizer.warmup_updates: warm-up and decay take {used} updates, the run has {total}")


def learning_rate(settings: OptimizerSettings, update: int, total: int | None) -> float:
    """Learning rate of one update.

    The peak is reached exactly at update `warmup_updates`, the minimum exactly at update `total`.

    Args:
        settings: the schedule.
        update: number of the update, counted from 1.
        total: updates that the schedule spans; later ones keep the minimum. None only for "constant".
    """
    peak, warmup = settings.learning_rate, settings.warmup_updates
    if update < warmup:
        return peak * update / warmup
    if settings.schedule == "constant":
        return peak
    start = warmup if settings.schedule != "wsd" else total - settings.decay_updates
    progress = min(1.0, max(0.0, (update - start) / max(1, total - start)))
    share = (1.0 + math.cos(math.pi * progress)) / 2.0 if settings.schedule == "cosine" else 1.0 - progress
    return peak * (settings.minimum_ratio + (1.0 - settings.minimum_ratio) * share)
