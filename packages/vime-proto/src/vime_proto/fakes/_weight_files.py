"""Weights that lie in files: reading a chunk, writing a manifest's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import grpc

from vime_proto.errors import ContractError, StatusError
from vime_proto.weights.v1 import weights_pb2 as pb


def root_of(config: pb.TransportConfig) -> Path:
    """The folder of a file or shm transport.

    Raises:
        ContractError: a URI that is no local file's.
    """
    if config.WhichOneof("transport") == "shm":
        return Path(config.shm.root)
    uri = urlparse(config.file.root_uri)
    if uri.scheme not in ("", "file"):
        raise ContractError("config.file.root_uri", f"scheme {uri.scheme!r} is not known here; valid: file")
    return Path(url2pathname(uri.path))


def chunk_path(root: Path, update_id: str, source_id: str, index: int) -> Path:
    """Where a chunk lies."""
    return root / update_id / source_id / f"{index}.bin"


def read_chunk(root: Path, update_id: str, source_id: str, index: int) -> bytes:
    """The bytes of a chunk.

    Raises:
        StatusError: NOT_FOUND, naming the file.
    """
    path = chunk_path(root, update_id, source_id, index)
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"cannot read chunk {index} of {source_id!r} at {path}: {error.strerror}"
        raise StatusError(grpc.StatusCode.NOT_FOUND, message) from None


def write_chunks(root: Path, update_id: str, streams: Mapping[str, Sequence[bytes]]) -> None:
    """Writes every chunk of an update where the file and shm transports look for it."""
    for source_id, chunks in streams.items():
        for index, data in enumerate(chunks):
            path = chunk_path(root, update_id, source_id, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
