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
from vime_r3.trace._ranges import Range


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
    shape = check_header(trace.header)
    if rows is not None and rows != shape.rows:
        raise ContractError("header.rows", f"must be {rows} (tokens - 1), got {shape.rows}")
    size = shape.rows * shape.layers * shape.row_bytes
    if size > max_bytes:
        raise ContractError("header.rows", f"decodes to {size} bytes, more than the limit of {max_bytes}")
    read = _payload.source(trace, payload)
    ids = _view(trace.header, shape, read)
    if ids is None:
        ids = _assemble(trace.header, shape, read)
    if check:
        for start, stop in shape.filled:
            check_ids(ids[start:stop], shape.experts, shape.layer_ids, start)
    valid = _all_but(shape.holes, np.ones(shape.rows, dtype=np.bool_))
    exact = _all_but([(r.start, r.stop) for r in trace.header.inexact], valid.copy())
    return Routes(ids, valid, exact, shape.layer_ids, shape.experts)


def _all_but(ranges: list[Range], mask: np.ndarray) -> np.ndarray:
    """The mask with some ranges made false."""
    for start, stop in ranges:
        mask[start:stop] = False
    return mask


def _view(header: pb.RoutingTraceHeader, shape: Shape, read) -> np.ndarray | None:
    """All rows without a copy; None when they do not lie in the payload one after the other."""
    if not shape.in_order:
        return None
    size = shape.rows * shape.layers * shape.row_bytes
    data = read(0, size)
    if len(data) != size:
        raise ContractError("payload", f"{len(data)} of {size} bytes could be read")
    at = 0
    for index, chunk in enumerate(header.chunks):
        end = at + chunk.raw_length
        verify(data[at:end], chunk.checksum, f"chunks[{index}]")
        at = end
    return np.frombuffer(data, dtype=shape.dtype).reshape(shape.rows, shape.layers, shape.top_k)


def _assemble(header: pb.RoutingTraceHeader, shape: Shape, read) -> np.ndarray:
    make = np.zeros if shape.holes else np.empty
    ids = make((shape.rows, shape.layers, shape.top_k), dtype=shape.dtype)
    for index, chunk in enumerate(header.chunks):
        block = ids[chunk.rows.start : chunk.rows.stop, chunk.layers.start : chunk.layers.stop]
        block[...] = np.frombuffer(_payload.raw_bytes(read, chunk, index), dtype=shape.dtype).reshape(block.shape)
    return ids
