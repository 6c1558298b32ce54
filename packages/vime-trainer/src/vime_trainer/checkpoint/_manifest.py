"""Which part of which tensor lies in which file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vime_trainer.checkpoint._boxes import Box
from vime_trainer.checkpoint._shards import Shard

__all__ = ["Manifest", "Piece", "Stored", "entries_of", "merge", "read"]


@dataclass(frozen=True)
class Piece:
    """A stored part.

    Attributes:
        file: name of the file.
        key: name of the tensor in it.
        box: where the part lies in the whole tensor.
    """

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Stored:
    """A whole tensor in pieces that cover it once.

    Attributes:
        dtype: as torch names it, without "torch.".
        shape: of the whole.
        pieces: where it lies.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    def overlapping(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Pieces that hold a part of the box, and which."""
        for piece in self.pieces:
            common = box.overlap(piece.box)
            if common is not None:
                yield piece, common


Manifest = dict[str, Stored]


def entries_of(shards: Iterable[Shard], file: str) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """What a rank writes: keys and tensors for its file, and its part of the manifest as JSON values."""
    tensors, listed = [], {}
    for shard in shards:
        whole = shard.box == Box.whole(shard.shape)
        key = shard.name if whole else f"{shard.name}@{','.join(map(str, shard.box.offset))}"
        tensors.append((key, shard.data))
        dtype = str(shard.data.dtype).removeprefix("torch.")
        entry = listed.setdefault(shard.name, {"dtype": dtype, "shape": list(shard.shape), "pieces": []})
        entry["pieces"].append([file, key, list(shard.box.offset), list(shard.box.shape)])
    return tensors, listed


def merge(parts: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The manifest of all ranks.

    Args:
        parts: of each rank.
        names: tensors that must be in it.

    Raises:
        ValueError: ranks disagree on a tensor, or its pieces do not cover it exactly once; names the tensor.
    """
    whole: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            known = whole.setdefault(name, {**entry, "pieces": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(
                    f"{name}: ranks disagree: {known['dtype']} {known['shape']} and {entry['dtype']} {entry['shape']}"
                )
            known["pieces"].extend(entry["pieces"])
    for name in names:
        if name not in whole:
            raise ValueError(f"{name}: no rank writes it")
    for name, stored in read(whole).items():
        _check_cover(name, stored)
    return whole


def read(content: dict[str, Any]) -> Manifest:
    """A manifest from its JSON values."""
    return {
        name: Stored(
            entry["dtype"],
            tuple(entry["shape"]),
            [Piece(file, key, Box(tuple(offset), tuple(shape))) for file, key, offset, shape in entry["pieces"]],
        )
        for name, entry in content.items()
    }


def _check_cover(name: str, stored: Stored) -> None:
    whole, boxes = Box.whole(stored.shape), [piece.box for piece in stored.pieces]
    held = sum(box.size for box in boxes)
    inside = all(box.overlap(whole) == box for box in boxes if box.size)
    # Pieces sorted by their first axis; only neighbours in that order can share elements, which keeps it short.
    ordered = sorted((box for box in boxes if box.size), key=lambda box: box.offset)
    twice = False
    for place, box in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if box.offset and other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            twice = twice or box.overlap(other) is not None
    if held != whole.size or twice or not inside:
        raise ValueError(f"{name}: its shards hold {held} elements of {whole.size}{', some twice' if twice else ''}")
