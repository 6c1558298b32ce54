"""Which part of a trace a rank needs: the rows of its tokens and the layers of its pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace import _ranges, check_header
from vime_r3.trace._ranges import Range

__all__ = ["join_layers", "layer_range", "layer_ranges", "payload_bytes", "row_ranges"]


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

    With virtual pipeline stages the layers of a rank are apart; a range over all of them has layers of other ranks too:
    see ``layer_ranges``.
    """
    return (min(layer_ids), max(layer_ids) + 1) if len(layer_ids) else None


def layer_ranges(layer_ids: Sequence[int], whole: Sequence[int]) -> list[Range]:
    """The fewest ranges of layers that cover those of a rank and no other layer of a trace.

    What a rank receives for each of them, ``join_layers`` makes one trace.

    Args:
        layer_ids: global layer numbers of a rank.
        whole: those of the trace: all MoE layers of the model.

    Raises:
        ContractError: a layer that the trace does not have.
    """
    missing = sorted(set(layer_ids) - set(whole))
    if missing:
        raise ContractError("layer_ids", f"no layer {missing[0]} in the trace's {sorted(whole)}")
    layers = sorted(whole)
    mine = np.isin(layers, list(layer_ids))
    return [(layers[start], layers[stop - 1] + 1) for start, stop in _ranges.of_mask(mine)]


def join_layers(parts: Sequence[pb.RoutingTrace]) -> pb.RoutingTrace:
    """Parts of one trace, of the same rows in other layers, as one trace. Payloads are inline, and copied.

    Args:
        parts: at least one, by ascending layers.

    Raises:
        ContractError: parts of different rows, holes or kinds of ids, or layers that do not ascend.
    """
    header, shapes = pb.RoutingTraceHeader(), [check_header(part.header) for part in parts]
    header.CopyFrom(parts[0].header)
    del header.chunks[:], header.layer_ids[:]
    offset = 0
    for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if (shape.rows, shape.holes, shape.experts, shape.top_k) != (
            shapes[0].rows,
            shapes[0].holes,
            shapes[0].experts,
            shapes[0].top_k,
        ):
            raise ContractError(f"parts[{index}]", "rows, holes, experts or top-k differ from those of the part before")
        for chunk in part.header.chunks:
            moved = header.chunks.add()
            moved.CopyFrom(chunk)
            moved.layers.start += len(header.layer_ids)
            moved.layers.stop += len(header.layer_ids)
            moved.stored.offset += offset
        header.layer_ids.extend(shape.layer_ids)
        offset += part.header.payload_length
    header.payload_length = offset
    check_header(header)
    return pb.RoutingTrace(header=header, inline=b"".join(part.inline for part in parts))


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
