"""The order of rows in an epoch."""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def _mix(values: np.ndarray) -> np.ndarray:
    # The finaliser of SplitMix64 (Steele et al. 2014): a bijection of 64-bit numbers, so keys never collide.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(rows), int64 [rows], that depends on nothing but its arguments (not on numpy's version)."""
    start = np.array([(seed * _GOLDEN + epoch + 1) & _MASK], dtype=np.uint64)
    stream = int(_mix(start)[0])
    steps = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mix(steps + np.uint64(stream)), kind="stable")
