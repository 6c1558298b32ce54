"""Cuts uncompressed routing traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.routing.v1 import routing_pb2
from vime_proto.tensor import numpy_dtype


def slice_trace(
    trace: routing_pb2.RoutingTrace,
    payload: bytes,
    rows: Sequence[common.IndexRange],
    layers: common.IndexRange | None,
) -> routing_pb2.RoutingTrace:
    """The trace cut to row ranges and to the layers numbered [start, stop); other rows are holes.

    Compressed chunks that touch the wanted rows are kept whole in their rows, and cannot be cut by layer.
    """
    old = trace.header
    wanted = [(r.start, min(r.stop, old.rows)) for r in rows] or [(0, old.rows)]
    keep = [i for i, number in enumerate(old.layer_ids) if layers is None or layers.start <= number < layers.stop]
    header = routing_pb2.RoutingTraceHeader(
        experts=old.experts, top_k=old.top_k, layer_ids=[old.layer_ids[i] for i in keep], rows=old.rows, dtype=old.dtype
    )
    kind, out = numpy_dtype(old.dtype), b""
    covered = np.zeros(old.rows, bool)
    for chunk in old.chunks:
        data = payload[chunk.stored.offset : chunk.stored.offset + chunk.stored.length]
        mine = [i for i in keep if chunk.layers.start <= i < chunk.layers.stop]
        cube = np.frombuffer(data, kind).reshape(
            chunk.rows.stop - chunk.rows.start, chunk.layers.stop - chunk.layers.start, old.top_k
        )
        for start, stop in wanted:
            low, high = max(start, chunk.rows.start), min(stop, chunk.rows.stop)
            if low >= high or not mine:
                continue
            cut = cube[low - chunk.rows.start : high - chunk.rows.start, mine[0] - chunk.layers.start :][:, : len(mine)]
            part = np.ascontiguousarray(cut).tobytes()
            covered[low:high] = True
            header.chunks.add(
                rows=common.IndexRange(start=low, stop=high),
                layers=common.IndexRange(start=keep.index(mine[0]), stop=keep.index(mine[-1]) + 1),
                stored=common.ByteRange(offset=len(out), length=len(part)),
                raw_length=len(part),
                checksum=checksum(part),
                compression=routing_pb2.COMPRESSION_NONE,
            )
            out += part
    # A chunk may cover rows that are holes.
    for hole in old.holes:
        covered[hole.start : hole.stop] = False
    header.holes.extend(_runs(~covered))
    header.spans.extend(old.spans)
    header.inexact.extend(old.inexact)
    header.payload_length = len(out)
    return routing_pb2.RoutingTrace(header=header, inline=out)


def _runs(mask: np.ndarray) -> list[common.IndexRange]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [common.IndexRange(start=int(a), stop=int(b)) for a, b in edges.reshape(-1, 2)]
