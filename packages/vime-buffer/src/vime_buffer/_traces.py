"""Cutting a routing trace: the rows and layers asked for, copying no other bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import zstandard

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2
from vime_proto.tensor import itemsize

Spans = list[tuple[int, int]]
ReadBytes = Callable[[int, int], bytes | memoryview]


def merge(ranges: Iterable[tuple[int, int]]) -> Spans:
    """Half-open ranges as ascending, disjoint ones."""
    merged: Spans = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def intersect(these: Spans, start: int, stop: int) -> Spans:
    """The parts of ascending, disjoint ranges within [start, stop)."""
    return [(max(low, start), min(high, stop)) for low, high in these if max(low, start) < min(high, stop)]


def subtract(start: int, stop: int, these: Spans) -> Spans:
    """[start, stop) without ascending, disjoint ranges."""
    left: Spans = []
    for low, high in intersect(these, start, stop):
        if start < low:
            left.append((start, low))
        start = high
    return left + [(start, stop)] * (start < stop)


def cut(
    header: routing_pb2.RoutingTraceHeader,
    rows: Sequence[tuple[int, int]],
    layers: tuple[int, int] | None,
    read: ReadBytes,
) -> routing_pb2.RoutingTrace:
    """The trace of some rows and layers, inline; all other rows are holes.

    Raw chunks are cut exactly. A compressed one is passed on as it lies when all of its layers are wanted, else unpacked and cut.

    Args:
        header: of the stored trace.
        rows: row ranges wanted; empty for all.
        layers: numbers of the layers wanted, [start, stop); None for all.
        read: bytes of the payload from (offset, length).
    """
    ids = list(header.layer_ids)
    first = 0 if layers is None else sum(number < layers[0] for number in ids)
    last = len(ids) if layers is None else sum(number < layers[1] for number in ids)
    last = max(first, last)
    if not rows and (first, last) == (0, len(ids)):
        return routing_pb2.RoutingTrace(header=header, inline=bytes(read(0, header.payload_length)))
    holes = merge((hole.start, hole.stop) for hole in header.holes)
    asked = merge(rows) if rows else [(0, header.rows)]
    kept = [span for low, high in asked for span in subtract(low, min(high, header.rows), holes)]
    answer = routing_pb2.RoutingTraceHeader(
        experts=header.experts, top_k=header.top_k, layer_ids=ids[first:last], rows=header.rows, dtype=header.dtype
    )
    answer.holes.extend(_ranges(subtract(0, header.rows, kept)))
    answer.inexact.extend(_ranges(s for one in header.inexact for s in intersect(kept, one.start, one.stop)))
    for span in header.spans:
        for low, high in intersect(kept, span.rows.start, span.rows.stop):
            answer.spans.add(rows=common_pb2.IndexRange(start=low, stop=high), version=span.version)
    payload: list[bytes] = []
    written = 0
    for chunk in header.chunks:
        for piece, data in _pieces(header, chunk, kept, (first, last), read):
            piece.stored.offset, piece.stored.length = written, len(data)
            written += len(data)
            payload.append(data)
            answer.chunks.append(piece)
    answer.payload_length = written
    return routing_pb2.RoutingTrace(header=answer, inline=b"".join(payload))


def _ranges(spans: Iterable[tuple[int, int]]) -> list[common_pb2.IndexRange]:
    return [common_pb2.IndexRange(start=low, stop=high) for low, high in spans]


def _pieces(header, chunk, kept: Spans, layers: tuple[int, int], read: ReadBytes):
    rows = intersect(kept, chunk.rows.start, chunk.rows.stop)
    low, high = max(chunk.layers.start, layers[0]), min(chunk.layers.stop, layers[1])
    if not rows or low >= high:
        return
    whole_layers = (low, high) == (chunk.layers.start, chunk.layers.stop)
    packed = chunk.compression == routing_pb2.COMPRESSION_ZSTD
    if packed and whole_layers:
        yield (
            _piece(chunk, (chunk.rows.start, chunk.rows.stop), (low, high), layers[0]),
            bytes(read(chunk.stored.offset, chunk.stored.length)),
        )
        return
    size = itemsize(header.dtype)
    width = (chunk.layers.stop - chunk.layers.start) * header.top_k * size
    unpacked = _unpack(read(chunk.stored.offset, chunk.stored.length), chunk.raw_length) if packed else None
    for start, stop in rows:
        offset, length = (start - chunk.rows.start) * width, (stop - start) * width
        if unpacked is None:
            data = read(chunk.stored.offset + offset, length)
        else:
            data = unpacked[offset : offset + length]
        if not whole_layers:
            block = np.frombuffer(data, dtype=np.uint8).reshape(stop - start, -1, header.top_k * size)
            data = block[:, low - chunk.layers.start : high - chunk.layers.start].tobytes()
        data = bytes(data)
        piece = _piece(chunk, (start, stop), (low, high), layers[0])
        piece.compression = routing_pb2.COMPRESSION_NONE
        piece.raw_length = len(data)
        if chunk.HasField("checksum"):
            piece.checksum.CopyFrom(checksum(data, chunk.checksum.algorithm))
        yield piece, data


def _piece(chunk, rows: tuple[int, int], layers: tuple[int, int], first_layer: int) -> routing_pb2.TraceChunk:
    piece = routing_pb2.TraceChunk()
    piece.CopyFrom(chunk)
    piece.rows.start, piece.rows.stop = rows
    piece.layers.start, piece.layers.stop = layers[0] - first_layer, layers[1] - first_layer
    return piece


def _unpack(data: bytes | memoryview, raw_length: int) -> bytes:
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_length)
    except zstandard.ZstdError as error:
        raise ContractError("routing.header.chunks", f"a stored chunk is no zstd frame: {error}") from None
