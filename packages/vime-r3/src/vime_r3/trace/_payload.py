"""Bytes of chunks: stored, compressed, read from wherever the payload is."""

from __future__ import annotations

from collections.abc import Callable

from vime_proto.checksum import digest, verify
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb

Bytes = bytes | bytearray | memoryview
# A payload that is not inline: all of its bytes, or a function that reads (offset, length).
Payload = Bytes | Callable[[int, int], bytes]


def codec(compression: int):
    """The zstandard module, or None for raw bytes.

    Raises:
        ContractError: another compression.
        ImportError: zstandard is not installed; says how to install it.
    """
    if compression == pb.COMPRESSION_NONE:
        return None
    if compression != pb.COMPRESSION_ZSTD:
        raise ContractError("compression", f"unknown value {compression}; valid: NONE (1), ZSTD (2)")
    try:
        import zstandard
    except ImportError:
        raise ImportError("this trace is compressed with zstd: pip install 'vime-r3[zstd]'") from None
    return zstandard


def packer(compression: int, level: int = 3) -> Callable[[memoryview], bytes | memoryview]:
    """What makes a chunk's raw bytes those to store; uncompressed ones stay as they are.

    Raises: as ``codec``.
    """
    zstd = codec(compression)
    return (lambda raw: raw) if zstd is None else zstd.ZstdCompressor(level=level).compress


def seal(chunk: pb.TraceChunk, stored: bytes | memoryview) -> None:
    """States the checksum of a chunk's stored bytes."""
    checksum = chunk.checksum
    checksum.algorithm, checksum.value = common.CHECKSUM_ALGORITHM_XXH3_64, digest(stored)


def source(trace: pb.RoutingTrace, payload: Payload | None) -> Callable[[int, int], memoryview]:
    """How to read stored bytes of a trace.

    Raises:
        ContractError: the payload is elsewhere and none was given, or it is too short.
    """
    length = trace.header.payload_length
    if payload is None:
        if trace.WhichOneof("payload") != "inline":
            kind = trace.WhichOneof("payload") or "nowhere"
            raise ContractError("payload", f"is {kind}, not inline: give its bytes or a function that reads them")
        payload = trace.inline
    if callable(payload):
        reader = payload
        return lambda offset, size: memoryview(reader(offset, size))
    view = memoryview(payload).cast("B")
    if len(view) != length:
        raise ContractError("payload", f"has {len(view)} bytes, the header says {length}")
    return lambda offset, size: view[offset : offset + size]


def stored_bytes(read, chunk: pb.TraceChunk, index: int) -> memoryview:
    """The stored bytes of a chunk, verified against its checksum."""
    stored = chunk.stored
    data = read(stored.offset, stored.length)
    if len(data) != stored.length:
        raise ContractError(f"chunks[{index}]", f"{len(data)} of {stored.length} bytes could be read")
    verify(data, chunk.checksum, f"chunks[{index}]")
    return data


def raw_bytes(read, chunk: pb.TraceChunk, index: int) -> bytes | memoryview:
    """The ids of a chunk, verified and decompressed."""
    data = stored_bytes(read, chunk, index)
    zstd = codec(chunk.compression)
    if zstd is None:
        return data
    try:
        if zstd.frame_content_size(data) not in (-1, chunk.raw_length):
            raise ContractError(f"chunks[{index}]", f"the zstd frame does not hold {chunk.raw_length} bytes")
        raw = zstd.ZstdDecompressor().decompress(data, max_output_size=chunk.raw_length)
    except zstd.ZstdError as error:
        raise ContractError(f"chunks[{index}]", f"no zstd frame of {chunk.raw_length} bytes: {error}") from None
    if len(raw) != chunk.raw_length:
        raise ContractError(f"chunks[{index}]", f"decompressed to {len(raw)} bytes instead of {chunk.raw_length}")
    return raw
