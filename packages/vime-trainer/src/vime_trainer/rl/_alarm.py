"""Alarm on the log-prob difference between trainer and engine: engines with other weights than they claim show there."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from ._figures import DIFFERENCE


class Band:
    """The values that a figure had at earlier steps.

    Args:
        name: what it is, for people.
        factor: too much is above factor x the median of earlier values.
        floor: nothing below it is too much.
        window: how many earlier steps count.
    """

    def __init__(self, name: str, factor: float, floor: float, window: int = 20):
        self._name = name
        self._factor = factor
        self._floor = floor
        self._earlier: deque[float] = deque(maxlen=window)

    def check(self, value: float) -> str | None:
        """What is wrong, or None. The first value makes the band; one that is outside does not widen it."""
        limit = self._floor
        if self._earlier:
            limit = max(limit, self._factor * statistics.median(self._earlier))
            if value > limit:
                return f"{self._name} is {value:.3g}, above {limit:.3g}"
        self._earlier.append(value)
        return None


class DifferenceAlarm:
    """Watches the mean over all tokens, and the mean of the worst sequence: one bad prompt drowns in the first.

    Args:
        factor, floor: see Band; a single sequence is given ten times the floor.
    """

    def __init__(self, factor: float, floor: float):
        self._bands = {
            f"{DIFFERENCE}/mean": Band("the mean", factor, floor),
            f"{DIFFERENCE}/sequence_max": Band("the worst sequence's mean", factor, 10 * floor),
        }

    def check(self, figures: Mapping[str, float]) -> str | None:
        """What is wrong with a step's figures, or None."""
        found = [band.check(figures[name]) for name, band in self._bands.items() if name in figures]
        faults = [fault for fault in found if fault is not None]
        if not faults:
            return None
        return (
            f"log-prob difference between trainer and engine: {'; '.join(faults)}; do the engines run the weights that "
            "they claim?"
        )
