"""Time for leases: comparable across restarts, and indifferent to changes of the wall clock while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable


class LeaseClock:
    """Seconds since the epoch at its creation, advanced by a monotonic clock.

    Args:
        wall: seconds since the epoch, read once.
        monotonic: seconds that never jump.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        return self._monotonic() + self._offset
