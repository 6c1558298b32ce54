"""What a trace's header must hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import check_version
from vime_r3.trace import _ranges
from vime_r3.trace._ranges import Range


def id_dtype(experts: int) -> tuple[np.dtype, int]:
    """The numpy type and the ``Dtype`` of an id: uint8 up to 256 experts, uint16 above."""
    if not 1 <= experts <= 65_536:
        raise ContractError("experts", f"must be in [1, 65536], got {experts}")
    return (np.dtype("<u1"), common.DTYPE_UINT8) if experts <= 256 else (np.dtype("<u2"), common.DTYPE_UINT16)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A header's numbers, checked."""

    rows: int
    layer_ids: tuple[int, ...]
    top_k: int
    experts: int
    dtype: np.dtype
    holes: list[Range]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer."""
        return self.top_k * self.dtype.itemsize

    @property
    def layers(self) -> int:
        return len(self.layer_ids)

    @property
    def filled(self) -> list[Range]:
        """Row ranges that are no holes."""
        return _ranges.complement(self.holes, self.rows)


def check_shape(experts: int, top_k: int, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Checks the numbers of a model's MoE layers and answers the layer ids as a tuple."""
    layers = tuple(int(layer) for layer in layer_ids)
    if not layers or layers[0] < 0 or any(low >= high for low, high in zip(layers, layers[1:], strict=False)):
        raise ContractError("layer_ids", f"must be ascending global layer numbers, at least one, got {list(layers)}")
    if not 1 <= top_k <= experts:
        raise ContractError("top_k", f"must be in [1, {experts}] (experts), got {top_k}")
    return layers


def check_header(header: pb.RoutingTraceHeader, field: str = "header") -> Shape:
    """Checks a header: shape, type, holes, version spans, and that the chunks cover every row that is no hole, once.

    Raises:
        ContractError: names the field under ``field``.
    """
    try:
        return _check(header)
    except ContractError as error:
        raise error.under(field) from None


def hole_count(header: pb.RoutingTraceHeader) -> int:
    """Rows without routes."""
    return sum(hole.stop - hole.start for hole in header.holes)


def _check(header: pb.RoutingTraceHeader) -> Shape:
    dtype, enum = id_dtype(header.experts)
    if header.dtype != enum:
        wanted, got = common.Dtype.Name(enum), common.Dtype.Name(header.dtype)
        raise ContractError("dtype", f"must be {wanted} for {header.experts} experts, got {got}")
    layers = check_shape(header.experts, header.top_k, header.layer_ids)
    for name in ("rows", "payload_length"):
        if not header.HasField(name):
            raise ContractError(name, "must be set; 0 is a value")
    rows = header.rows
    shape = Shape(rows, layers, header.top_k, header.experts, dtype, _ranges.ascending(header.holes, "holes", rows))
    _ranges.ascending(header.inexact, "inexact", rows)
    spans = _ranges.ascending([span.rows for span in header.spans], "spans", rows)
    for index, span in enumerate(header.spans):
        check_version(span.version, f"spans[{index}].version")
    missing = _overlap(_ranges.complement(_ranges.merge(spans), rows), shape.filled)
    if missing:
        raise ContractError("spans", f"rows [{missing[0]}, {missing[1]}) have routes but no policy version")
    _check_chunks(header, shape)
    return shape


def _check_chunks(header: pb.RoutingTraceHeader, shape: Shape) -> None:
    blocks: list[tuple[Range, Range]] = []
    for index, chunk in enumerate(header.chunks):
        where = f"chunks[{index}]"
        rows = _ranges.of_message(chunk.rows, f"{where}.rows", shape.rows)
        layers = _ranges.of_message(chunk.layers, f"{where}.layers", shape.layers)
        if not (chunk.stored.HasField("offset") and chunk.stored.HasField("length")):
            raise ContractError(f"{where}.stored", "offset and length must be set; 0 is a value")
        if chunk.stored.offset + chunk.stored.length > header.payload_length:
            end = chunk.stored.offset + chunk.stored.length
            raise ContractError(f"{where}.stored", f"ends at byte {end} of a payload of {header.payload_length}")
        raw = (rows[1] - rows[0]) * (layers[1] - layers[0]) * shape.row_bytes
        if chunk.raw_length != raw:
            raise ContractError(f"{where}.raw_length", f"must be {raw} for its rows and layers, got {chunk.raw_length}")
        if chunk.compression not in (pb.COMPRESSION_NONE, pb.COMPRESSION_ZSTD):
            raise ContractError(f"{where}.compression", f"unknown value {chunk.compression}; valid: NONE (1), ZSTD (2)")
        if chunk.compression == pb.COMPRESSION_NONE and chunk.stored.length != raw:
            raise ContractError(f"{where}.stored", f"must have {raw} bytes, got {chunk.stored.length}")
        blocks.append((rows, layers))
    if _in_sequence(blocks, shape):
        return
    # Coverage is counted on the grid of all block edges: its size depends on the number of blocks, not of rows.
    row_edges = np.unique([0, shape.rows, *(edge for rows, _ in blocks for edge in rows)])
    layer_edges = np.unique([0, shape.layers, *(edge for _, layers in blocks for edge in layers)])
    count = np.zeros((len(row_edges), len(layer_edges)), dtype=np.int32)
    for rows, layers in blocks:
        top, bottom = np.searchsorted(row_edges, rows)
        left, right = np.searchsorted(layer_edges, layers)
        count[top:bottom, left:right] += 1
    count = count[:-1, :-1]
    if (count > 1).any():
        row, layer = np.argwhere(count > 1)[0]
        at = f"row {row_edges[row]}, layer {shape.layer_ids[layer_edges[layer]]}"
        raise ContractError("chunks", f"{at} is covered more than once")
    for row, layer in np.argwhere(count == 0):
        gap = _overlap([(int(row_edges[row]), int(row_edges[row + 1]))], shape.filled)
        if gap:
            number = shape.layer_ids[layer_edges[layer]]
            raise ContractError("chunks", f"rows [{gap[0]}, {gap[1]}), layer {number}, are no hole but have no chunk")


def _in_sequence(blocks: list[tuple[Range, Range]], shape: Shape) -> bool:
    """Whether the blocks are whole rows, one after the other, from the first to the last: the common case, seen at a glance."""
    row = 0
    for rows, layers in blocks:
        if rows[0] != row or layers != (0, shape.layers):
            return False
        row = rows[1]
    return row == shape.rows


def _overlap(first: list[Range], second: list[Range]) -> Range | None:
    """The first part that lies in both lists; None when they are disjoint."""
    for start, stop in first:
        for low, high in second:
            if max(start, low) < min(stop, high):
                return max(start, low), min(stop, high)
    return None
