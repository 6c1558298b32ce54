"""Alarm on the log-prob difference between trainer and engine: engines with other weights than they claim show there."""

from __future__ import annotations

import statistics
from collections import deque


class DifferenceAlarm:
    """Compares a step's mean with the band of earlier steps.

    Args:
        factor: alarm above factor x the median of earlier means.
        floor: no alarm below.
        window: how many earlier steps count.
    """

    def __init__(self, factor: float, floor: float, window: int = 20):
        self._factor = factor
        self._floor = floor
        self._earlier: deque[float] = deque(maxlen=window)

    def check(self, mean: float) -> str | None:
        """What is wrong, or None. A mean that raised the alarm does not widen the band."""
        limit = self._floor
        if self._earlier:
            limit = max(limit, self._factor * statistics.median(self._earlier))
        elif mean > self._floor:
            # The first step has no band to compare with: it makes one.
            self._earlier.append(mean)
            return None
        if mean > limit:
            return (
                f"mean log-prob difference between trainer and engine is {mean:.3g}, above {limit:.3g}; do the engines "
                "run the weights that they claim?"
            )
        self._earlier.append(mean)
        return None
