"""Traces as files on fsspec: written whole, read by byte ranges. Needs fsspec: ``pip install 'vime-r3[storage]'``."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace import select
from vime_r3.trace._ranges import Range

__all__ = ["TraceFiles"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


class TraceFiles:
    """Payloads of traces below one root: what a trace with a ``uri`` points to.

    Args:
        root: directory or fsspec URI (``s3://bucket/routes``); nothing outside it is read, written or deleted.

    Raises:
        ImportError: fsspec is not installed; says how to install it.
    """

    def __init__(self, root: str):
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ImportError("traces by URI need fsspec: pip install 'vime-r3[storage]'") from None
        self._url_to_fs = url_to_fs
        self._fs, self._root = url_to_fs(root)
        self._root = self._root.rstrip("/")

    def write(self, trace: pb.RoutingTrace, name: str) -> pb.RoutingTrace:
        """Moves an inline payload into a file.

        Args:
            trace: with an inline payload.
            name: of the file below the root: letters, digits, dots, dashes, underscores, slashes between folders.

        Returns:
            The same header with the payload's ``uri``. The file appears under its name whole or not at all.

        Raises:
            ContractError: a payload that is elsewhere, or a name that could leave the root.
        """
        if trace.WhichOneof("payload") != "inline" or len(trace.inline) != trace.header.payload_length:
            raise ContractError("payload", f"must be inline, {trace.header.payload_length} bytes")
        if not _NAME.fullmatch(name):
            raise ContractError("name", f"{name!r} is no path of letters, digits, dots, dashes and underscores")
        path = f"{self._root}/{name}"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if "file" in _protocols(self._fs):
            # A rename is atomic; object stores show an object only once it is complete.
            partial = f"{path}.{uuid.uuid4().hex}.partial"
            self._fs.pipe_file(partial, trace.inline)
            self._fs.mv(partial, path)
        else:
            self._fs.pipe_file(path, trace.inline)
        return pb.RoutingTrace(header=trace.header, uri=self._fs.unstrip_protocol(path))

    def reader(self, trace: pb.RoutingTrace) -> Callable[[int, int], bytes]:
        """What ``decode``, ``select`` and ``truncate`` take as ``payload``: reads (offset, length) of a trace's file.

        Raises:
            ContractError: no URI, or one that is not below the root.
        """
        fs, path = self._resolve(trace)
        return lambda offset, length: fs.cat_file(path, start=offset, end=offset + length) if length else b""

    def read(
        self, trace: pb.RoutingTrace, *, rows: Range | None = None, layer_ids: Sequence[int] | None = None
    ) -> pb.RoutingTrace:
        """A part of a trace with its payload inline; of the file, only the chunks that it touches are read.

        Raises:
            ContractError: as ``reader`` and ``vime_r3.trace.select``.
        """
        return select(trace, rows=rows, layer_ids=layer_ids, payload=self.reader(trace))

    def delete(self, trace: pb.RoutingTrace) -> None:
        """Deletes a trace's file; one that is gone already is no error.

        Raises:
            ContractError: as ``reader``.
        """
        fs, path = self._resolve(trace)
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            return

    def _resolve(self, trace: pb.RoutingTrace):
        if trace.WhichOneof("payload") != "uri":
            raise ContractError("payload", f"is {trace.WhichOneof('payload') or 'nowhere'}, not at a URI")
        fs, path = self._url_to_fs(trace.uri)
        inside = _protocols(fs) == _protocols(self._fs) and path.startswith(self._root + "/")
        if not inside or ".." in path.split("/"):
            raise ContractError("uri", f"{trace.uri!r} is not below {self._fs.unstrip_protocol(self._root)!r}")
        return self._fs, path


def _protocols(fs) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
