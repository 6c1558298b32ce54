"""Ids to a trace."""

from __future__ import annotations

from collections.abc import Sequence

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
    header, parts = chunked(
        ids, layer_ids, experts, version, valid, inexact, chunk_rows, chunk_layers, compression, level, check
    )
    return pb.RoutingTrace(header=header, inline=b"".join(parts))


def chunked(
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
) -> tuple[pb.RoutingTraceHeader, list[bytes | memoryview]]:
    """The header of a trace and its payload in parts, which are views of ``ids`` where its type and layout allow that."""
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
    header = pb.RoutingTraceHeader(experts=experts, top_k=top_k, layer_ids=numbers, rows=rows, dtype=enum)
    header.holes.extend(_ranges.to_messages(holes))
    header.inexact.extend(_ranges.to_messages(_ranges.merge(inexact)))
    header.spans.extend(_spans(version, holes, rows))
    # One conversion for all chunks; no copy when the engine's array has the right type already.
    narrow = np.ascontiguousarray(ids, dtype=dtype)
    if holes:
        narrow = narrow.copy() if narrow is ids or np.shares_memory(narrow, ids) else narrow
        for start, stop in holes:
            narrow[start:stop] = 0
    width = chunk_layers or layers
    parts: list[bytes | memoryview] = []
    offset = 0
    for row in range(0, rows, chunk_rows):
        for layer in range(0, layers, width):
            block = np.ascontiguousarray(narrow[row : row + chunk_rows, layer : layer + width])
            raw = memoryview(block).cast("B") if block.size else b""
            stored = _payload.store(raw, compression, level)
            chunk = header.chunks.add(
                rows=common.IndexRange(start=row, stop=row + block.shape[0]),
                layers=common.IndexRange(start=layer, stop=layer + block.shape[1]),
                stored=common.ByteRange(offset=offset, length=len(stored)),
                raw_length=block.nbytes,
                compression=compression,
            )
            _payload.describe(chunk, stored)
            parts.append(stored)
            offset += len(stored)
    header.payload_length = offset
    return header, parts


def _holes(valid: np.ndarray | None, rows: int) -> list[Range]:
    if valid is None:
        return []
    valid = np.asarray(valid)
    if valid.shape != (rows,) or valid.dtype != np.bool_:
        raise ContractError("valid", f"must be bool [{rows}], got {valid.dtype} {list(valid.shape)}")
    return _ranges.of_mask(~valid)


def _spans(version: Spans, holes: list[Range], rows: int) -> list[pb.VersionSpan]:
    given = [(0, rows, version)] if isinstance(version, common.PolicyVersion) else list(version)
    for index, (start, stop, weights) in enumerate(given):
        check_version(weights, f"version[{index}]")
        if not 0 <= start <= stop <= rows:
            raise ContractError(f"version[{index}]", f"[{start}, {stop}) is no range within [0, {rows})")
    filled = _ranges.complement(holes, rows)
    spans = [
        pb.VersionSpan(rows=common.IndexRange(start=max(start, low), stop=min(stop, high)), version=weights)
        for start, stop, weights in given
        for low, high in filled
        if max(start, low) < min(stop, high)
    ]
    ranges = [(span.rows.start, span.rows.stop) for span in spans]
    if any(before[1] > after[0] for before, after in zip(ranges, ranges[1:], strict=False)):
        raise ContractError("version", "spans must be ascending and disjoint")
    if _ranges.merge(ranges) != filled:
        raise ContractError("version", "spans must cover every row that is no hole")
    return spans
