"""Half-open ranges of rows as sorted lists of ``(start, stop)``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError

Range = tuple[int, int]


def of_message(message: common.IndexRange, field: str, limit: int) -> Range:
    """The range of a message, which must state both ends and lie within ``[0, limit)``."""
    start, stop = message.start, message.stop
    # What is not 0 is set.
    if not (start or message.HasField("start")) or not (stop or message.HasField("stop")):
        raise ContractError(field, "start and stop must be set; 0 is a value")
    if not start < stop <= limit:
        raise ContractError(field, f"[{start}, {stop}) is no range within [0, {limit})")
    return start, stop


def ascending(messages: Iterable[common.IndexRange], field: str, limit: int) -> list[Range]:
    """The ranges of messages that must be ascending and disjoint."""
    ranges: list[Range] = []
    end = 0
    for index, message in enumerate(messages):
        start, stop = of_message(message, f"{field}[{index}]", limit)
        if start < end:
            raise ContractError(f"{field}[{index}]", f"starts at {start}, before the end of the range before")
        ranges.append((start, stop))
        end = stop
    return ranges


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Their union, sorted, with touching ranges joined and empty ones dropped."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def complement(ranges: list[Range], limit: int) -> list[Range]:
    """What of ``[0, limit)`` lies outside ``ranges`` (ascending, disjoint)."""
    edges = [0, *(edge for pair in ranges for edge in pair), limit]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def clip(ranges: Iterable[Range], start: int, stop: int) -> list[Range]:
    """What lies within ``[start, stop)``, counted from ``start``."""
    cut = [(max(low, start) - start, min(high, stop) - start) for low, high in ranges]
    return [pair for pair in cut if pair[0] < pair[1]]


def of_mask(mask: np.ndarray) -> list[Range]:
    """Ranges where a bool array is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def to_mask(ranges: Iterable[Range], length: int) -> np.ndarray:
    """bool [length], true within the ranges."""
    mask = np.zeros(length, dtype=np.bool_)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask


def to_messages(ranges: Iterable[Range]) -> list[common.IndexRange]:
    """As messages."""
    return [common.IndexRange(start=start, stop=stop) for start, stop in ranges]
