"""Ids to the bytes of a serialized ``RoutingTrace`` and back, with one copy and none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace._decode import Routes, decode
from vime_r3.trace._encode import Spans, chunked
from vime_r3.trace._payload import Bytes
from vime_r3.trace._ranges import Range

_HEADER = pb.RoutingTrace.DESCRIPTOR.fields_by_name["header"].number
_INLINE = pb.RoutingTrace.DESCRIPTOR.fields_by_name["inline"].number
_LENGTH_DELIMITED = 2


def dumps(
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
) -> bytes:
    """``encode(...).SerializeToString()``, but the ids are copied once: for files and for messages of one's own.

    Args are those of ``encode``, and so are the errors.
    """
    header = pb.RoutingTraceHeader()
    parts = chunked(
        header, ids, layer_ids, experts, version, valid, inexact, chunk_rows, chunk_layers, compression, level, check
    )
    head, size = header.SerializeToString(), header.payload_length
    return b"".join((_tag(_HEADER), _varint(len(head)), head, _tag(_INLINE), _varint(size), *parts))


def loads(data: Bytes, *, rows: int | None = None, check: bool = True, max_bytes: int = 4 << 30) -> Routes:
    """``decode(RoutingTrace.FromString(data), ...)``, but ids of whole rows that are not compressed are views of ``data``.

    Args:
        data: a serialized ``RoutingTrace`` with an inline payload; it must not change while the routes are used.
        rows, check, max_bytes: as in ``decode``.

    Raises:
        ContractError: no such message, a payload that is elsewhere, or as ``decode``.
    """
    view = memoryview(data).cast("B")
    trace, payload = pb.RoutingTrace(), None
    for number, content in _fields(view):
        if number == _INLINE:
            payload = content
            trace.inline = b""
        elif number == _HEADER:
            trace.header.MergeFromString(bytes(content))
        else:
            raise ContractError("payload", "is not inline: its bytes must be here")
    return decode(trace, rows=rows, payload=payload, check=check, max_bytes=max_bytes)


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each top-level field; all fields of this message are length-delimited."""
    at = 0
    try:
        while at < len(view):
            tag, at = _read_varint(view, at)
            length, at = _read_varint(view, at)
            if tag & 7 != _LENGTH_DELIMITED or at + length > len(view):
                raise IndexError
            yield tag >> 3, view[at : at + length]
            at += length
    except IndexError:
        raise ContractError("trace", f"byte {at} of {len(view)}: no serialized RoutingTrace") from None


def _tag(number: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError
