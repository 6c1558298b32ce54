"""Ids to a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import check_version
from vime_r3.trace import _payload, _ranges
from vime_r3.trace._header import check_shape, id_dtype
from vime_r3.trace._ids import check_ids
from vime_r3.trace._ranges import Range

Spans = common.PolicyVersion | Sequence[tuple[int, int, common.PolicyVersion]]


def encode(
    ids: np.ndarray,
    *,
    layer_ids: Sequence[int],
    experts: int,
    version: Spans,
    valid: np.ndarray | None = None,
    inexact: Sequence[Range] = (),
    chunk_rows: int = 1024,
    chunk_layers: int | None = None,
    compression: int = pb.COMPRESSION_NONE,
    level: int = 3,
    check: bool = True,
) -> pb.RoutingTrace:
    """Encodes routes into a trace with an inline payload.

    Args:
        ids: integers ``[rows, layers, top_k]``; row i routes token i, so rows = tokens - 1 for a whole sample.
        layer_ids: global numbers of the MoE layers, ascending, counted from 0 over all decoder layers.
        experts: routed experts of a layer.
        version: the weights that computed all rows, or ``(start, stop, version)`` spans that cover every valid row.
        valid: bool ``[rows]``; false rows are holes, whose ids are ignored and stored as 0. Default: all valid.
        inexact: row ranges that cannot be replayed exactly.
        chunk_rows: rows of a chunk.
        chunk_layers: layers of a chunk; default all. Fewer let a pipeline stage read its layers alone.
        compression: ``COMPRESSION_NONE`` or ``COMPRESSION_ZSTD`` (needs zstandard).
        level: zstd level.
        check: whether ids are checked; switch it off only for ids that were checked before.

    Raises:
        ContractError: wrong shape or type, an id that is out of range or twice in a row, layers that hold only zeros,
            rows without a version.
    """
    trace = pb.RoutingTrace()
    parts = chunked(
        trace.header,
        ids,
        layer_ids,
        experts,
        version,
        valid,
        inexact,
        chunk_rows,
        chunk_layers,
        compression,
        level,
        check,
    )
    trace.inline = b"".join(parts)
    return trace


def chunked(
    header: pb.RoutingTraceHeader,
    ids: np.ndarray,
    layer_ids: Sequence[int],
    experts: int,
    version: Spans,
    valid: np.ndarray | None = None,
    inexact: Sequence[Range] = (),
    chunk_rows: int = 1024,
    chunk_layers: int | None = None,
    compression: int = pb.COMPRESSION_NONE,
    level: int = 3,
    check: bool = True,
) -> list[bytes | memoryview]:
    """Fills in a trace's header and answers its payload in parts, views of ``ids`` where its type and layout allow that."""
    ids = np.asarray(ids)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ContractError("ids", f"must be integers [rows, layers, top_k], got {ids.dtype} {list(ids.shape)}")
    dtype, enum = id_dtype(experts)
    rows, layers, top_k = ids.shape
    numbers = check_shape(experts, top_k, layer_ids)
    if len(numbers) != layers:
        raise ContractError("ids", f"have {layers} layers, but layer_ids names {len(numbers)}")
    if chunk_rows < 1 or (chunk_layers is not None and chunk_layers < 1):
        raise ContractError("chunk_rows", f"chunks must have rows and layers, got {chunk_rows} x {chunk_layers}")
    holes = _holes(valid, rows)
    if check:
        for start, stop in _ranges.complement(holes, rows):
            check_ids(ids[start:stop], experts, numbers, start)
    header.experts, header.top_k, header.rows, header.dtype = experts, top_k, rows, enum
    header.layer_ids.extend(numbers)
    if holes:
        header.holes.extend(_ranges.to_messages(holes))
    if inexact:
        header.inexact.extend(_ranges.to_messages(_ranges.merge(inexact)))
    for start, stop, weights in _spans(version, holes, rows):
        span = header.spans.add()
        covered = span.rows
        covered.start, covered.stop = start, stop
        span.version.CopyFrom(weights)
    blank = ~np.asarray(valid) if holes else None
    width = layers if chunk_layers is None else min(chunk_layers, layers)
    as_they_are = _bytes(ids) if ids.dtype == dtype and ids.flags.c_contiguous and width == layers else None
    row_bytes = layers * top_k * dtype.itemsize
    pack = _payload.packer(compression, level)
    chunks: list[tuple[pb.TraceChunk, bytes | memoryview]] = []
    offset = 0
    for start, stop, left, right in _grid(rows, layers, chunk_rows, width):
        gaps = blank is not None and blank[start:stop].any()
        if as_they_are is not None and not gaps:
            raw = as_they_are[start * row_bytes : stop * row_bytes]
        else:
            block = np.array(ids[start:stop, left:right], dtype=dtype, order="C")
            if gaps:
                block[blank[start:stop]] = 0
            raw = _bytes(block)
        # Field by field: messages made for the purpose and copied cost more than the checksum of a chunk.
        chunk = header.chunks.add(raw_length=len(raw), compression=compression)
        covered, across = chunk.rows, chunk.layers
        covered.start, covered.stop = start, stop
        across.start, across.stop = left, right
        stored = pack(raw)
        length = len(stored)
        place = chunk.stored
        place.offset, place.length = offset, length
        chunks.append((chunk, stored))
        offset += length
    header.payload_length = offset
    # From the last to the first: whoever joins the parts then finds the first ones in the cache, not the last ones.
    for chunk, stored in reversed(chunks):
        _payload.seal(chunk, stored)
    return [stored for _, stored in chunks]


def _grid(rows: int, layers: int, height: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, end row, first layer, end layer of each chunk, in the order of the payload."""
    for row in range(0, rows, height):
        for layer in range(0, layers, width):
            yield row, min(row + height, rows), layer, min(layer + width, layers)


def _bytes(block: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return memoryview(block.reshape(-1).view(np.uint8))


def _holes(valid: np.ndarray | None, rows: int) -> list[Range]:
    if valid is None:
        return []
    valid = np.asarray(valid)
    if valid.shape != (rows,) or valid.dtype != np.bool_:
        raise ContractError("valid", f"must be bool [{rows}], got {valid.dtype} {list(valid.shape)}")
    return _ranges.of_mask(~valid)


def _spans(version: Spans, holes: list[Range], rows: int) -> list[tuple[int, int, common.PolicyVersion]]:
    filled = _ranges.complement(holes, rows)
    if isinstance(version, common.PolicyVersion):
        check_version(version, "version[0]")
        return [(start, stop, version) for start, stop in filled]
    given = list(version)
    for index, (start, stop, weights) in enumerate(given):
        check_version(weights, f"version[{index}]")
        if not 0 <= start <= stop <= rows:
            raise ContractError(f"version[{index}]", f"[{start}, {stop}) is no range within [0, {rows})")
    spans = [
        (max(start, low), min(stop, high), weights)
        for start, stop, weights in given
        for low, high in filled
        if max(start, low) < min(stop, high)
    ]
    ranges = [(start, stop) for start, stop, _ in spans]
    if any(before[1] > after[0] for before, after in zip(ranges, ranges[1:], strict=False)):
        raise ContractError("version", "spans must be ascending and disjoint")
    if _ranges.merge(ranges) != filled:
        raise ContractError("version", "spans must cover every row that is no hole")
    return spans
