"""Boxes: which part of a tensor a shard is. Pure arithmetic on offsets and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Box", "cut", "unravel"]


@dataclass(frozen=True)
class Box:
    """The elements from `offset` up to `offset + shape` of a tensor; scalars have neither."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What both have in common; None without any element."""
        low = [max(one, two) for one, two in zip(self.offset, other.offset, strict=True)]
        high = [
            min(one + size, two + extent)
            for one, size, two, extent in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(tuple(low), shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds `outer`."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def moved(self, base: Sequence[int], target: Sequence[int]) -> Box:
        """The same box where what lay at `base` lies at `target`."""
        offset = tuple(mine - old + new for mine, old, new in zip(self.offset, base, target, strict=True))
        return Box(offset, self.shape)


def cut(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a flattened row-major tensor, as boxes in the order of the elements.

    A distributed optimizer holds such ranges. At most two boxes a dimension, less one: a part of a first row, whole
    rows, a part of a last row.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,))] if shape else [Box((), ())]
    row = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, cut(shape[1:], head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, cut(shape[1:], head, row))
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return boxes + _in_row(last, cut(shape[1:], 0, tail))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes]


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Place of element `index` of a flattened row-major tensor."""
    place = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.append(rest)
    return tuple(reversed(place))
