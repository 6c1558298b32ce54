"""Payload files on fsspec: written whole or not at all, read by range."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Sequence

from fsspec.core import url_to_fs

from vime_buffer._store.payloads import URI_MARK, StoredFile
from vime_proto.errors import ContractError

log = logging.getLogger(__name__)

_PARTIAL = ".partial"
_CLAIM = "database.json"
_OWN_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}(\.partial)?")


class BlobFiles:
    """Files below a root.

    Args:
        root: directory or fsspec URI. Several databases may share it.
        owner: name of the database, one path segment: new files lie below it, and nothing else is swept.
        trace_roots: further roots below which ``read_uri`` may read and ``delete`` may delete.

    Attributes:
        claim: path of the file that says which database the owner's folder belongs to.
    """

    def __init__(self, root: str, owner: str, trace_roots: Sequence[str] = ()):
        try:
            self._fs, self._root = url_to_fs(root)
        except (ValueError, ImportError) as error:
            raise ContractError("blobs", f"{root!r}: {error}") from None
        self._owner = owner
        self.claim = f"{self._root}/{owner}/{_CLAIM}"
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))
        try:
            self._fs.makedirs(self._root, exist_ok=True)
        except OSError as error:
            raise ContractError("blobs", f"cannot make {root!r}: {error.strerror or error}") from None
        self._trace_roots = [url_to_fs(one) for one in trace_roots]

    def write(self, data: bytes) -> StoredFile:
        """Writes a new file and names it."""
        blob_id = uuid.uuid4().hex
        path = f"{self._owner}/{blob_id[:2]}/{blob_id}"
        full = f"{self._root}/{path}"
        if self._local:
            self._fs.makedirs(f"{self._root}/{self._owner}/{blob_id[:2]}", exist_ok=True)
            # A rename is atomic, so a reader or a sweep never meets half a file under its final name.
            self._fs.pipe_file(full + _PARTIAL, data)
            self._fs.mv(full + _PARTIAL, full)
        else:
            # Object stores make an object visible once it is complete.
            self._fs.pipe_file(full, data)
        return StoredFile(blob_id, path, len(data))

    def read_claim(self) -> bytes | None:
        """What ``write_claim`` wrote last, by whomever."""
        try:
            return self._fs.cat_file(self.claim)
        except FileNotFoundError:
            return None

    def write_claim(self, data: bytes) -> None:
        """Replaces the file that says whose the owner's folder is."""
        self._fs.makedirs(f"{self._root}/{self._owner}", exist_ok=True)
        if self._local:
            self._fs.pipe_file(self.claim + _PARTIAL, data)
            self._fs.mv(self.claim + _PARTIAL, self.claim)
        else:
            self._fs.pipe_file(self.claim, data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file.

        Raises:
            OSError: it is gone.
        """
        end = None if length is None else offset + length
        return self._fs.cat_file(f"{self._root}/{path}", start=offset, end=end)

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes files, and traces below a trace root; one that cannot be deleted is logged and left to the next sweep."""
        for path in paths:
            try:
                if path.startswith(URI_MARK):
                    fs, target = url_to_fs(path[len(URI_MARK) :])
                    fs.rm_file(target)
                else:
                    self._fs.rm_file(f"{self._root}/{path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("payload file %s could not be deleted: %s", path, error)

    def sweep(self, known: set[str]) -> int:
        """Deletes files that no row names: a process died between writing and committing. Answers how many.

        Files of other names are not ours, and stay.
        """
        folder = f"{self._root.rstrip('/')}/{self._owner}/"
        if not self._fs.exists(folder):
            return 0
        found = [name[len(folder) :] for name in self._fs.find(folder) if name.startswith(folder)]
        paths = [f"{self._owner}/{name}" for name in found if _OWN_NAME.fullmatch(name)]
        orphans = [path for path in paths if path not in known]
        self.delete(orphans)
        return len(orphans)

    def check_uri(self, uri: str, field: str) -> None:
        """Refuses a URI outside the configured roots."""
        fs, path = url_to_fs(uri)
        parts = path.split("/")
        inside = any(
            type(fs) is type(root_fs) and path.startswith(root.rstrip("/") + "/") for root_fs, root in self._trace_roots
        )
        if not inside or ".." in parts:
            roots = ", ".join(root for _, root in self._trace_roots) or "none configured"
            raise ContractError(field, f"{uri!r} is not below a root of trace_roots ({roots})")

    def read_uri(self, uri: str, offset: int, length: int) -> bytes:
        """Bytes of a trace below one of the trace roots."""
        fs, path = url_to_fs(uri)
        return fs.cat_file(path, start=offset, end=offset + length)
