"""A trace to ids."""

from __future__ import annotations

import dataclasses

import numpy as np

from vime_proto.checksum import verify
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace import _payload
from vime_r3.trace._header import Shape, check_header
from vime_r3.trace._ids import check_ids
from vime_r3.trace._payload import Payload


@dataclasses.dataclass(frozen=True)
class Routes:
    """Decoded routes.

    Attributes:
        ids: uint8 or uint16 ``[rows, layers, top_k]``, read-only where it is a view of the payload; hole rows hold
            unspecified values.
        valid: bool ``[rows]``; false rows are holes: their tokens route themselves.
        exact: bool ``[rows]``; false rows are holes or cannot be replayed exactly.
        layer_ids: global numbers of the layers.
        experts: routed experts of a layer.
    """

    ids: np.ndarray
    valid: np.ndarray
    exact: np.ndarray
    layer_ids: tuple[int, ...]
    experts: int


def decode(
    trace: pb.RoutingTrace,
    *,
    rows: int | None = None,
    payload: Payload | None = None,
    check: bool = True,
    max_bytes: int = 4 << 30,
) -> Routes:
    """Decodes a whole trace; decode a part as ``decode(select(trace, ...))``.

    Uncompressed chunks of whole rows that follow one another are not copied: ``ids`` is then a view of the payload.

    Args:
        trace: the trace.
        rows: rows that it must have (tokens - 1), if known.
        payload: the bytes, or a function that reads (offset, length), where they are not inline.
        check: whether ids are checked; checksums always are.
        max_bytes: refuses traces that decode to more.

    Raises:
        ContractError: a header that breaks its contract, other rows than ``rows``, a failed checksum, a wrong id.
        ImportError: zstd without zstandard.
    """
    header = trace.header
    shape = check_header(header)
    if rows is not None and rows != shape.rows:
        raise ContractError("header.rows", f"must be {rows} (tokens - 1), got {shape.rows}")
    size = shape.size
    if size > max_bytes:
        raise ContractError("header.rows", f"decodes to {size} bytes, more than the limit of {max_bytes}")
    valid, exact = _masks(header, shape)
    read = _payload.source(trace, payload)
    ids = _view(header, shape, read) if shape.in_order else _assemble(header, shape, read)
    if check:
        for start, stop in shape.filled:
            check_ids(ids[start:stop], shape.experts, shape.layer_ids, start)
    return Routes(ids, valid, exact, shape.layer_ids, shape.experts)


def _masks(header: pb.RoutingTraceHeader, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are no holes, and those of them that can be replayed exactly."""
    valid = np.empty(shape.rows, dtype=np.bool_)
    valid.fill(True)
    for start, stop in shape.holes:
        valid[start:stop] = False
    exact = valid.copy()
    for part in header.inexact:
        exact[part.start : part.stop] = False
    return valid, exact


def _view(header: pb.RoutingTraceHeader, shape: Shape, read) -> np.ndarray:
    """All rows without a copy."""
    size = shape.size
    data = read(0, size)
    if len(data) != size:
        raise ContractError("payload", f"{len(data)} of {size} bytes could be read")
    # From the last to the first: whoever has just put the bytes here left the last ones in the cache.
    end = size
    for index, chunk in reversed(list(enumerate(header.chunks))):
        start = end - chunk.raw_length
        verify(data[start:end], chunk.checksum, f"chunks[{index}]")
        end = start
    return np.frombuffer(data, dtype=shape.dtype).reshape(shape.rows, shape.layers, shape.top_k)


def _assemble(header: pb.RoutingTraceHeader, shape: Shape, read) -> np.ndarray:
    make = np.zeros if shape.holes else np.empty
    ids = make((shape.rows, shape.layers, shape.top_k), dtype=shape.dtype)
    for index, chunk in enumerate(header.chunks):
        block = ids[chunk.rows.start : chunk.rows.stop, chunk.layers.start : chunk.layers.stop]
        block[...] = np.frombuffer(_payload.raw_bytes(read, chunk, index), dtype=shape.dtype).reshape(block.shape)
    return ids
