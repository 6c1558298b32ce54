"""A JSONL file with an index of offsets: any row in one read, nothing else in memory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from vime_proto.errors import ContractError


class RowError(ContractError):
    """A row that cannot be used; the text names file and line."""


class JsonlFile:
    """Rows of a file, one JSON object a line. Blank lines are no rows.

    Args:
        path: the file.
        field: how errors name it.
        start, stop: rows kept, as in a Python slice: negative ones count from the end.

    Raises:
        RowError: a line that is no JSON object (every line is read once, here).
        ContractError: no such file, or no rows.
    """

    def __init__(self, path: str, field: str = "path", start: int | None = None, stop: int | None = None):
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ContractError(field, f"cannot read {path!r}: {error.strerror}") from None
        offsets, lengths, lines = [], [], []
        hasher = hashlib.blake2b(digest_size=16)
        position = 0
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                hasher.update(line)
                if line.strip():
                    self._parse(line, number)
                    offsets.append(position)
                    lengths.append(len(line))
                    lines.append(number)
                position += len(line)
        kept = slice(start, stop)
        self._offsets = np.array(offsets, dtype=np.int64)[kept]
        self._lengths = np.array(lengths, dtype=np.int64)[kept]
        self._lines = np.array(lines, dtype=np.int64)[kept]
        if not len(self._offsets):
            raise ContractError(field, f"{path!r} has no rows" + (f" in [{start}:{stop}]" if offsets else ""))
        self.digest = f"{hasher.hexdigest()}:{start}:{stop}"

    def __len__(self) -> int:
        return len(self._offsets)

    def line(self, row: int) -> int:
        """Line number of a row, counted from 1."""
        return int(self._lines[row])

    def read(self, row: int) -> tuple[dict[str, Any], str]:
        """A row, parsed and as written.

        Raises:
            RowError: it changed since the file was indexed.
        """
        raw = os.pread(self._handle, int(self._lengths[row]), int(self._offsets[row]))
        return self._parse(raw, self.line(row)), raw.decode().strip()

    def close(self) -> None:
        os.close(self._handle)

    def _parse(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(raw)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RowError(f"{self.path}:{number}", f"not JSON: {error}") from None
        if not isinstance(record, dict):
            raise RowError(f"{self.path}:{number}", f"must be a JSON object, got {type(record).__name__}")
        return record
