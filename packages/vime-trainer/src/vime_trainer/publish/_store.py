"""Where the bytes of published versions lie until no engine needs them."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol


class ChunkStore(Protocol):
    """Chunks by update id, source id and index."""

    def write(self, update_id: str, source_id: str, index: int, parts: Iterable[memoryview]) -> None:
        """Stores one chunk: the parts, one after the other."""

    def read(self, update_id: str, source_id: str, index: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each part of a chunk.

        Raises:
            KeyError: the update was removed.
        """

    def rename(self, update_id: str, new_id: str) -> None:
        """Gives an update another id; what had that one before is replaced."""

    def remove(self, update_id: str) -> None:
        """Frees an update's chunks; nothing to do when they are gone."""

    def close(self) -> None:
        """Frees everything that this store wrote."""


class MemoryStore:
    """In this process; for the stream transport."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[tuple[str, int], bytes]] = {}

    def write(self, update_id: str, source_id: str, index: int, parts: Iterable[memoryview]) -> None:
        self._chunks.setdefault(update_id, {})[(source_id, index)] = b"".join(parts)

    def read(self, update_id: str, source_id: str, index: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
        data = self._chunks[update_id][(source_id, index)]
        return ((at, data[at : at + part_bytes]) for at in range(0, len(data), part_bytes))

    def rename(self, update_id: str, new_id: str) -> None:
        self._chunks[new_id] = self._chunks.pop(update_id)

    def remove(self, update_id: str) -> None:
        self._chunks.pop(update_id, None)

    def close(self) -> None:
        self._chunks.clear()


class DirectoryStore:
    """Files "<root>/<update_id>/<source_id>/<index>.bin", on a disk or a memory file system."""

    def __init__(self, root: Path):
        self._root = root
        self._written: set[str] = set()
        root.mkdir(parents=True, exist_ok=True)

    def path(self, update_id: str, source_id: str, index: int) -> Path:
        """The file of a chunk."""
        return self._root / update_id / source_id / f"{index}.bin"

    def write(self, update_id: str, source_id: str, index: int, parts: Iterable[memoryview]) -> None:
        self._written.add(update_id)
        path = self.path(update_id, source_id, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for part in parts:
                file.write(part)

    def read(self, update_id: str, source_id: str, index: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
        try:
            file = self.path(update_id, source_id, index).open("rb")
        except FileNotFoundError:
            raise KeyError(update_id) from None
        return self._parts(file, part_bytes)

    @staticmethod
    def _parts(file, part_bytes: int) -> Iterator[tuple[int, bytes]]:
        with file:
            at = 0
            while data := file.read(part_bytes):
                yield at, data
                at += len(data)

    def rename(self, update_id: str, new_id: str) -> None:
        self.remove(new_id)
        (self._root / update_id).rename(self._root / new_id)
        self._written = self._written - {update_id} | {new_id}

    def remove(self, update_id: str) -> None:
        self._written.discard(update_id)
        shutil.rmtree(self._root / update_id, ignore_errors=True)

    def remove_leftovers(self, names: re.Pattern[str]) -> None:
        """Removes updates with such names, of a process of the same run that was killed."""
        for folder in self._root.iterdir():
            if names.fullmatch(folder.name) and folder.is_dir() and folder.name not in self._written:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for update_id in list(self._written):
            self.remove(update_id)
        with contextlib.suppress(OSError):
            self._root.rmdir()
