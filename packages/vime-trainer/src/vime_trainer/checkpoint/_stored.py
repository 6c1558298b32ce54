"""A checkpoint on disk: what it says of itself, whether it is whole, and slices of its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vime_trainer.checkpoint import _manifest
from vime_trainer.checkpoint._boxes import Box
from vime_trainer.checkpoint._file import checksum_of
from vime_trainer.checkpoint._folders import FORMAT, STATE, TENSORS, CheckpointError
from vime_trainer.checkpoint._models import OPTIMIZER, WEIGHTS

__all__ = ["StoredCheckpoint"]


class StoredCheckpoint:
    """Opened, not verified.

    Attributes:
        path: its folder.
        content: contents of state.json.
        manifest: all tensors.
        identity: differs between checkpoints.

    Raises:
        CheckpointError: no checkpoint, a damaged description, or another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.content = _read_json(self.path / STATE)
        if self.content.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path / STATE}: format {self.content.get('format')!r}; this version reads {FORMAT}"
            )
        self.verify([TENSORS])
        self.manifest = _manifest.read(_read_json(self.path / TENSORS))
        self.identity = checksum_of(self.path / STATE)
        self._open: dict[str, Any] = {}
        self._kinds: dict[tuple[str, str], dict[str, _manifest.Stored]] | None = None

    def weights(self, model: str) -> list[str]:
        """Names of a model's weights, sorted."""
        return sorted(name for name in self.manifest if name.startswith(f"{model}/{WEIGHTS}/"))

    def optimizer_kinds(self, model: str, key: str) -> dict[str, _manifest.Stored]:
        """What is stored of a parameter's optimizer state, by kind."""
        if self._kinds is None:
            self._kinds = {}
            for name, entry in self.manifest.items():
                owner, what, *rest = name.split("/", 3)
                if what == OPTIMIZER and len(rest) == 2:
                    self._kinds.setdefault((owner, rest[1]), {})[rest[0]] = entry
        return self._kinds.get((model, key), {})

    def files_under(self, prefixes: Iterable[str]) -> list[str]:
        """Files that hold tensors whose names start so."""
        prefixes = tuple(prefixes)
        stored = [entry for name, entry in self.manifest.items() if name.startswith(prefixes)]
        return sorted({piece.file for entry in stored for piece in entry.pieces})

    def verify(self, files: Iterable[str]) -> None:
        """Reads files and compares them with their checksums.

        Raises:
            CheckpointError: one is missing or damaged; names it.
        """
        for name in files:
            file, entry = self.path / name, self.content["files"][name]
            if not file.is_file():
                raise CheckpointError(f"{self.path}: {name} is missing")
            if file.stat().st_size != entry["bytes"]:
                raise CheckpointError(f"{file}: damaged: {file.stat().st_size} bytes, not {entry['bytes']}")
            if checksum_of(file) != entry["xxh3_64"]:
                raise CheckpointError(f"{file}: damaged: its checksum is not the one in {STATE}")

    def fill(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a stored tensor, from as many files as hold parts of it, reading those parts alone.

        Args:
            name: of the tensor.
            box: which part; what lies outside the stored tensor is left as it is.
            target: with the box's shape.
        """
        for piece, common in self.manifest[name].overlapping(box):
            target[common.within(box)].copy_(self._slice(piece, common))

    def whole(self, name: str) -> Tensor:
        """A stored tensor that lies in one piece."""
        (piece,) = self.manifest[name].pieces
        return self._slice(piece, piece.box)

    def _slice(self, piece: _manifest.Piece, box: Box) -> Tensor:
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.path / piece.file, framework="pt", device="cpu")
            file = self._open[piece.file]
            if box == piece.box:
                return file.get_tensor(piece.key)
            return file.get_slice(piece.key)[box.within(piece.box)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / piece.file}: {piece.key}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file.parent}: no checkpoint (no {file.name})")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error
