"""Which part of a trace a rank needs: the rows of its tokens and the layers of its pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace import _ranges, check_header
from vime_r3.trace._ranges import Range

__all__ = ["layer_range", "payload_bytes", "row_ranges"]


def row_ranges(positions: np.ndarray, tokens: Sequence[int], *, join: int = 0) -> list[list[Range]]:
    """Rows of each sample that a rank's routers use.

    Args:
        positions: integers ``[n]``: places of this rank's tokens in a packed sequence of the samples, or -1 for padding;
            those that ``vime_r3.layout.take`` is given. Any order.
        tokens: tokens of each sample, in the order in which they are packed.
        join: ranges with at most so many rows between them become one: fewer ranges for some bytes more.

    Returns:
        For each sample ranges ``[start, stop)`` of its rows, ascending and disjoint; empty for a sample of which this rank
        has no token, or only the last, which has no row.

    Raises:
        ContractError: a position beyond the tokens.
    """
    positions = np.asarray(positions)
    total = sum(tokens)
    if positions.size and not (-1 <= int(positions.min()) and int(positions.max()) < total):
        raise ContractError("positions", f"must be -1 (padding) or in [0, {total})")
    needed = np.zeros(total, dtype=np.bool_)
    needed[positions[positions >= 0]] = True
    found, first = [], 0
    for count in tokens:
        ranges = _ranges.of_mask(needed[first : first + max(count - 1, 0)])
        found.append(_joined(ranges, join))
        first += count
    return found


def layer_range(layer_ids: Sequence[int]) -> Range | None:
    """Layers ``[first, last + 1)`` that cover those of a rank; None when it has none.

    With virtual pipeline stages the layers of a rank are apart; a range over all of them has layers of other ranks too.
    Then ask for each chunk's layers of its own.
    """
    return (min(layer_ids), max(layer_ids) + 1) if len(layer_ids) else None


def payload_bytes(header: pb.RoutingTraceHeader, rows: Sequence[Range], layers: Range | None) -> int:
    """Uncompressed bytes of a part of a trace: what a rank receives when it asks for no more.

    Args:
        header: of the trace.
        rows: ranges ``[start, stop)`` of rows.
        layers: global layer numbers ``[start, stop)``; None for none.
    """
    shape = check_header(header)
    chosen = 0 if layers is None else sum(layers[0] <= layer < layers[1] for layer in shape.layer_ids)
    inside = [_ranges.clip(shape.filled, start, stop) for start, stop in rows]
    return chosen * shape.row_bytes * sum(stop - start for part in inside for start, stop in part)


def _joined(ranges: list[Range], gap: int) -> list[Range]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
