"""Where the bytes of a chunk come from: files that the backend can map, whichever way they arrive."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import fsspec
import grpc

from vime_proto.errors import ContractError, StatusError
from vime_proto.validate import validate_transport
from vime_proto.weights.v1 import weights_pb2 as pb


class Chunk:
    """The bytes of a chunk, and the path under which another process of this host finds them."""

    def __init__(self, path: str, data: memoryview):
        self.path = path
        self.data = data


class Transport:
    """A named way to receive. ``kind`` is "file", "shm" or "stream"."""

    def __init__(self, config: pb.TransportConfig, kind: str, root: str):
        self.config = config
        self.kind = kind
        self._root = root

    @contextlib.contextmanager
    def open(self, update_id: str, source_id: str, index: int) -> Iterator[Chunk]:
        """A chunk that lies ready.

        Raises:
            StatusError: FAILED_PRECONDITION, when it comes by stream; NOT_FOUND, when there is no such file (yet).
        """
        if self.kind == "stream":
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"transport {self.config.transport_id!r} is a stream: send chunks with SendChunks",
            )
        name = f"{update_id}/{source_id}/{index}.bin"
        try:
            local = _local_path(self._root)
            if local is not None:
                with _mapped(str(local / name)) as chunk:
                    yield chunk
            else:
                with fsspec.open(f"{self._root.rstrip('/')}/{name}", "rb") as file, anonymous(file.read()) as chunk:
                    yield chunk
        except FileNotFoundError:
            message = f"{self.kind} transport {self.config.transport_id!r}: no file {name!r} under {self._root}"
            raise StatusError(grpc.StatusCode.NOT_FOUND, message) from None


def make_transport(config: pb.TransportConfig, available: list[str], file_root: str | None, shm_root: str) -> Transport:
    """Checks a transport against what the engine allows.

    Raises:
        ContractError: an unavailable kind, or a root outside the configured one.
    """
    kind = validate_transport(config, available)
    if kind == "stream":
        return Transport(config, kind, "")
    root, allowed, field = (
        (config.file.root_uri, file_root or "", "config.file.root_uri")
        if kind == "file"
        else (config.shm.root, shm_root, "config.shm.root")
    )
    if not _within(root, allowed):
        raise ContractError(field, f"{root!r} is not under {allowed!r}, the root that this engine reads from")
    return Transport(config, kind, root)


@contextlib.contextmanager
def anonymous(data: bytes | memoryview) -> Iterator[Chunk]:
    """Bytes in a memory file without a name, which the system frees when this process ends, however it ends."""
    handle = os.memfd_create("vime-chunk")
    try:
        view = memoryview(data)
        written = 0
        while written < view.nbytes:
            written += os.write(handle, view[written:])
        yield Chunk(f"/proc/{os.getpid()}/fd/{handle}", view)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[Chunk]:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield Chunk(path, memoryview(b""))
            return
        # Not closed by hand: a view may outlive the block, and the mapping goes with the last one.
        yield Chunk(path, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def _local_path(root: str) -> Path | None:
    scheme, colon, rest = root.partition("://")
    if not colon:
        return Path(root)
    return Path(rest) if scheme in ("file", "local") else None


def _within(root: str, allowed: str) -> bool:
    mine, theirs = _local_path(root), _local_path(allowed)
    if mine is not None and theirs is not None:
        return mine.resolve().is_relative_to(theirs.resolve())
    if mine is not None or theirs is not None or ".." in PurePosixPath(root).parts:
        return False
    return PurePosixPath(root).is_relative_to(PurePosixPath(allowed))
