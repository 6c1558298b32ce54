"""Whether boxes tile a box."""

from __future__ import annotations

import math

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and extent in each dimension


def covered_once(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes that lie inside `shape` cover it exactly once: equal volume, and no two of them overlap."""
    volume = math.prod(shape)
    filled = [(first, extent) for first, extent in boxes if math.prod(extent)]
    if sum(math.prod(extent) for _, extent in filled) != volume:
        return False
    # Sweep along the first dimension: only boxes that share an index there are compared with one another.
    active: list[Box] = []
    for box in sorted(filled):
        low = box[0][0] if shape else 0
        active = [other for other in active if not shape or other[0][0] + other[1][0] > low]
        if any(_overlap(box, other) for other in active):
            return False
        active.append(box)
    return True


def _overlap(a: Box, b: Box) -> bool:
    return all(
        low < other + more and other < low + count
        for low, count, other, more in zip(a[0], a[1], b[0], b[1], strict=True)
    )
