"""What a trace's header must hold."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import check_version
from vime_r3.trace import _ranges
from vime_r3.trace._ranges import Range

_NARROW = np.dtype("<u1"), common.DTYPE_UINT8
_WIDE = np.dtype("<u2"), common.DTYPE_UINT16


def id_dtype(experts: int) -> tuple[np.dtype, int]:
    """The numpy type and the ``Dtype`` of an id: uint8 up to 256 experts, uint16 above."""
    if not 1 <= experts <= 65_536:
        raise ContractError("experts", f"must be in [1, 65536], got {experts}")
    return _NARROW if experts <= 256 else _WIDE


class Shape(NamedTuple):
    """A header's numbers, checked. ``in_order`` means that the payload's first bytes are the ids as they are: chunks of whole
    rows, uncompressed, one after the other."""

    rows: int
    layer_ids: tuple[int, ...]
    top_k: int
    experts: int
    dtype: np.dtype
    holes: list[Range]
    in_order: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer."""
        return self.top_k * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes of all ids."""
        return self.rows * len(self.layer_ids) * self.row_bytes

    @property
    def layers(self) -> int:
        return len(self.layer_ids)

    @property
    def filled(self) -> list[Range]:
        """Row ranges that are no holes."""
        return _ranges.complement(self.holes, self.rows)


def check_shape(experts: int, top_k: int, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Checks the numbers of a model's MoE layers and answers the layer ids as a tuple."""
    given = tuple(layer_ids)
    first = int(given[0]) if given else -1
    # Nearly every model has consecutive MoE layers, which are seen at a glance.
    layers = tuple(range(first, first + len(given)))
    ascending = layers == given
    if not ascending:
        layers = tuple(map(int, given))
        ascending = all(map(operator.lt, layers, layers[1:]))
    if first < 0 or not ascending:
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
    layers = check_shape(header.experts, header.top_k, header.layer_ids[:])
    for name in ("rows", "payload_length"):
        if not header.HasField(name):
            raise ContractError(name, "must be set; 0 is a value")
    rows = header.rows
    holes = _ranges.ascending(header.holes, "holes", rows)
    _ranges.ascending(header.inexact, "inexact", rows)
    spans = _ranges.ascending((span.rows for span in header.spans), "spans", rows)
    for index, span in enumerate(header.spans):
        check_version(span.version, f"spans[{index}].version")
    if spans != [(0, rows)]:
        missing = _overlap(_ranges.complement(_ranges.merge(spans), rows), _ranges.complement(holes, rows))
        if missing:
            raise ContractError("spans", f"rows [{missing[0]}, {missing[1]}) have routes but no policy version")
    in_order = _check_chunks(header, layers, header.top_k * dtype.itemsize, holes)
    return Shape(rows, layers, header.top_k, header.experts, dtype, holes, in_order)


def _check_chunks(
    header: pb.RoutingTraceHeader, layer_ids: tuple[int, ...], row_bytes: int, holes: list[Range]
) -> bool:
    """Whether the payload's first bytes are the ids as they are."""
    rows, layers, payload = header.rows, len(layer_ids), header.payload_length
    if _in_order(header, layers, layers * row_bytes):
        return True
    blocks: list[tuple[Range, Range]] = []
    # The first row that no chunk in order has covered so far; None once a chunk has broken the order.
    row: int | None = 0
    for index, chunk in enumerate(header.chunks):
        try:
            covered, across = _check_chunk(chunk, rows, layers, row_bytes, payload)
        except ContractError as error:
            raise error.under(f"chunks[{index}]") from None
        row = covered[1] if covered[0] == row and across == (0, layers) else None
        blocks.append((covered, across))
    if row == rows:
        return False
    filled = _ranges.complement(holes, rows)
    # Coverage is counted on the grid of all block edges: its size depends on the number of blocks, not of rows.
    row_edges = np.unique([0, rows, *(edge for covered, _ in blocks for edge in covered)])
    layer_edges = np.unique([0, layers, *(edge for _, across in blocks for edge in across)])
    count = np.zeros((len(row_edges), len(layer_edges)), dtype=np.int32)
    for covered, across in blocks:
        top, bottom = np.searchsorted(row_edges, covered)
        left, right = np.searchsorted(layer_edges, across)
        count[top:bottom, left:right] += 1
    count = count[:-1, :-1]
    if (count > 1).any():
        row, layer = np.argwhere(count > 1)[0]
        at = f"row {row_edges[row]}, layer {layer_ids[layer_edges[layer]]}"
        raise ContractError("chunks", f"{at} is covered more than once")
    for row, layer in np.argwhere(count == 0):
        gap = _overlap([(int(row_edges[row]), int(row_edges[row + 1]))], filled)
        if gap:
            number = layer_ids[layer_edges[layer]]
            raise ContractError("chunks", f"rows [{gap[0]}, {gap[1]}), layer {number}, are no hole but have no chunk")
    return False


def _in_order(header: pb.RoutingTraceHeader, layers: int, row_bytes: int) -> bool:
    """Whether the chunks are the common ones: whole rows, uncompressed, one after the other from the first row and byte on.

    What is accepted here would pass the full check, which says what is wrong with the rest; this one reads each field once.
    """
    row = end = 0
    for chunk in header.chunks:
        rows, across, stored = chunk.rows, chunk.layers, chunk.stored
        start, stop, offset = rows.start, rows.stop, stored.offset
        length = (stop - row) * row_bytes
        if start != row or stop <= row or across.start or across.stop != layers:
            return False
        if offset != end or stored.length != length or chunk.raw_length != length:
            return False
        if chunk.compression != pb.COMPRESSION_NONE or not across.HasField("start"):
            return False
        if not row and not (rows.HasField("start") and stored.HasField("offset")):
            return False
        row, end = stop, end + length
    return row == header.rows and end <= header.payload_length


def _check_chunk(chunk: pb.TraceChunk, rows: int, layers: int, row_bytes: int, payload: int) -> tuple[Range, Range]:
    """A chunk's rows and layers, checked against the trace's."""
    top, bottom = covered = _ranges.of_message(chunk.rows, "rows", rows)
    left, right = across = _ranges.of_message(chunk.layers, "layers", layers)
    stored = chunk.stored
    offset, length = stored.offset, stored.length
    # What is not 0 is set.
    if not (offset or stored.HasField("offset")) or not (length or stored.HasField("length")):
        raise ContractError("stored", "offset and length must be set; 0 is a value")
    if offset + length > payload:
        raise ContractError("stored", f"ends at byte {offset + length} of a payload of {payload}")
    raw = (bottom - top) * (right - left) * row_bytes
    if chunk.raw_length != raw:
        raise ContractError("raw_length", f"must be {raw} for its rows and layers, got {chunk.raw_length}")
    compression = chunk.compression
    if compression == pb.COMPRESSION_NONE:
        if length != raw:
            raise ContractError("stored", f"must have {raw} bytes, got {length}")
    elif compression != pb.COMPRESSION_ZSTD:
        raise ContractError("compression", f"unknown value {compression}; valid: NONE (1), ZSTD (2)")
    return covered, across


def _overlap(first: list[Range], second: list[Range]) -> Range | None:
    """The first part that lies in both lists; None when they are disjoint."""
    for start, stop in first:
        for low, high in second:
            if max(start, low) < min(stop, high):
                return max(start, low), min(stop, high)
    return None
