"""Parts of a trace: rows and layers, without touching chunks that lie outside, or decoding those that lie inside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace import _payload, _ranges
from vime_r3.trace._header import Shape, check_header
from vime_r3.trace._payload import Payload
from vime_r3.trace._ranges import Range


def select(
    trace: pb.RoutingTrace,
    *,
    rows: Range | None = None,
    layer_ids: Sequence[int] | None = None,
    payload: Payload | None = None,
) -> pb.RoutingTrace:
    """Rows ``[start, stop)`` and some layers as a trace of its own, whose row 0 is ``start``.

    Stored bytes of chunks that lie within are copied as they are; only chunks across the border are cut (and compressed
    again, where they were). Chunks outside are not read.

    Args:
        trace: the trace.
        rows: default all.
        layer_ids: global layer numbers, a consecutive part of the trace's; default all.
        payload: the bytes, or a function that reads (offset, length), where they are not inline.

    Raises:
        ContractError: rows or layers that the trace does not have, a failed checksum.
    """
    shape = check_header(trace.header)
    (start, stop), (left, right) = _rows(rows, shape), _layers(layer_ids, shape)
    read = _payload.source(trace, payload)
    header = pb.RoutingTraceHeader(
        experts=shape.experts,
        top_k=shape.top_k,
        layer_ids=shape.layer_ids[left:right],
        rows=stop - start,
        dtype=trace.header.dtype,
    )
    header.holes.extend(_ranges.to_messages(_ranges.clip(shape.holes, start, stop)))
    header.inexact.extend(
        _ranges.to_messages(_ranges.clip([(r.start, r.stop) for r in trace.header.inexact], start, stop))
    )
    for span in trace.header.spans:
        for low, high in _ranges.clip([(span.rows.start, span.rows.stop)], start, stop):
            header.spans.add(rows=common.IndexRange(start=low, stop=high), version=span.version)
    parts: list[bytes | memoryview] = []
    offset = 0
    for index in _touched(trace.header, (start, stop), (left, right)):
        chunk = trace.header.chunks[index]
        low, high = max(chunk.rows.start, start), min(chunk.rows.stop, stop)
        first, last = max(chunk.layers.start, left), min(chunk.layers.stop, right)
        inside = (low, high, first, last) == (chunk.rows.start, chunk.rows.stop, chunk.layers.start, chunk.layers.stop)
        new = header.chunks.add(
            rows=common.IndexRange(start=low - start, stop=high - start),
            layers=common.IndexRange(start=first - left, stop=last - left),
            raw_length=(high - low) * (last - first) * shape.row_bytes,
            compression=chunk.compression,
        )
        if inside:
            stored = _payload.stored_bytes(read, chunk, index)
            new.checksum.CopyFrom(chunk.checksum)
        else:
            raw = np.frombuffer(_payload.raw_bytes(read, chunk, index), dtype=shape.dtype)
            block = raw.reshape(chunk.rows.stop - chunk.rows.start, chunk.layers.stop - chunk.layers.start, shape.top_k)
            block = block[low - chunk.rows.start : high - chunk.rows.start]
            block = np.ascontiguousarray(block[:, first - chunk.layers.start : last - chunk.layers.start])
            stored = _payload.packer(chunk.compression)(memoryview(block).cast("B"))
            _payload.seal(new, stored)
        new.stored.offset, new.stored.length = offset, len(stored)
        parts.append(stored)
        offset += len(stored)
    header.payload_length = offset
    return pb.RoutingTrace(header=header, inline=b"".join(parts))


def truncate(trace: pb.RoutingTrace, rows: int, *, payload: Payload | None = None) -> pb.RoutingTrace:
    """The first ``rows`` rows (tokens - 1 of the shortened sample)."""
    return select(trace, rows=(0, rows), payload=payload)


def byte_ranges(
    header: pb.RoutingTraceHeader, *, rows: Range | None = None, layer_ids: Sequence[int] | None = None
) -> list[tuple[int, int, int]]:
    """``(chunk index, offset, length)`` of every chunk that a selection reads, ascending by chunk index."""
    shape = check_header(header)
    return [
        (index, header.chunks[index].stored.offset, header.chunks[index].stored.length)
        for index in _touched(header, _rows(rows, shape), _layers(layer_ids, shape))
    ]


def _touched(header: pb.RoutingTraceHeader, rows: Range, layers: Range) -> list[int]:
    return [
        index
        for index, chunk in enumerate(header.chunks)
        if max(chunk.rows.start, rows[0]) < min(chunk.rows.stop, rows[1])
        and max(chunk.layers.start, layers[0]) < min(chunk.layers.stop, layers[1])
    ]


def _rows(rows: Range | None, shape: Shape) -> Range:
    start, stop = rows if rows is not None else (0, shape.rows)
    if not 0 <= start <= stop <= shape.rows:
        raise ContractError("rows", f"[{start}, {stop}) is no range within the trace's [0, {shape.rows})")
    return start, stop


def _layers(layer_ids: Sequence[int] | None, shape: Shape) -> Range:
    if layer_ids is None:
        return 0, shape.layers
    wanted = tuple(int(layer) for layer in layer_ids)
    if wanted and wanted[0] in shape.layer_ids:
        left = shape.layer_ids.index(wanted[0])
        if shape.layer_ids[left : left + len(wanted)] == wanted:
            return left, left + len(wanted)
    raise ContractError("layer_ids", f"{list(wanted)} is no consecutive part of the trace's {list(shape.layer_ids)}")
