"""Which rows make up which batch: a pure function of the seed and a position that checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Cursor", "Order"]


@dataclass(frozen=True)
class Cursor:
    """The next row: its epoch, and its place in that epoch's order."""

    epoch: int = 0
    place: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Order:
    """Batches over rows in an endless sequence of epochs. A batch may reach over the end of an epoch.

    Args:
        lengths: tokens of each row.
        seed: of the orders.
        shuffle: another order in each epoch; otherwise that of the files.
        size: rows a batch; or
        tokens: most tokens a batch, with at least one row.
    """

    def __init__(
        self, lengths: Sequence[int], seed: int, shuffle: bool, size: int | None = None, tokens: int | None = None
    ) -> None:
        if (size is None) == (tokens is None):
            raise ValueError("exactly one of size and tokens must be given")
        self._lengths = lengths
        self._seed = seed
        self._shuffle = shuffle
        self._size = size
        self._tokens = tokens
        self._cached: tuple[int, np.ndarray] | None = None

    def batch(self, cursor: Cursor, to_epoch: int | None = None) -> tuple[list[int], Cursor]:
        """Rows of the batch that begins at `cursor`, and where the next begins.

        Args:
            cursor: first row.
            to_epoch: this epoch and later ones do not exist; the last batch may then be short, or empty at the end.
        """
        rows: list[int] = []
        used = 0
        while to_epoch is None or cursor.epoch < to_epoch:
            row = int(self._epoch(cursor.epoch)[cursor.place])
            used += self._lengths[row]
            full = len(rows) == self._size if self._size else bool(rows) and used > (self._tokens or 0)
            if full:
                break
            rows.append(row)
            ended = cursor.place + 1 == len(self._lengths)
            cursor = Cursor(cursor.epoch + 1, 0) if ended else Cursor(cursor.epoch, cursor.place + 1)
        return rows, cursor

    def count(self, epochs: int) -> int:
        """Number of batches in so many epochs."""
        cursor, batches = Cursor(), 0
        while cursor.epoch < epochs:
            _, cursor = self.batch(cursor, epochs)
            batches += 1
        return batches

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            count = len(self._lengths)
            if self._shuffle:
                self._cached = epoch, np.random.default_rng([self._seed, epoch]).permutation(count)
            else:
                self._cached = epoch, np.arange(count)
        return self._cached[1]
