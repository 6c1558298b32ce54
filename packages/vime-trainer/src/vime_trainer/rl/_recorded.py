"""The old policy's own expert routes (R2), kept from the pass that scores it for the optimizer steps that follow."""

from __future__ import annotations

import numpy as np

from vime_trainer.batch import Columns, MicroBatch
from vime_trainer.packed import RecordRows, ReplayRows

from ._routes import RouteCounts
from ._team import Team


class RecordedRoutes:
    """As `Routes`, of what this rank's routers chose. Before `keep` the model routes itself.

    With one optimizer step a batch there is no pass before the loss's own, which then is the old policy: nothing is
    recorded, nothing replayed, and the routes are those of the old policy all the same.

    Args:
        columns: the batch.
    """

    def __init__(self, columns: Columns):
        self._columns = columns
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._layer_ids: tuple[int, ...] = ()
        self._recording = False
        self._counts = RouteCounts()

    def start(self) -> None:
        """The next pass is recorded."""
        self._recording = True

    def keep(self, micros: list[MicroBatch], recorded: list[ReplayRows | None]) -> None:
        """Takes the routes of a pass, sample by sample: later passes cut the batch otherwise."""
        self._recording = False
        for micro, routes in zip(micros, recorded, strict=True):
            if routes is None:
                continue
            self._layer_ids = routes.layer_ids
            ends = np.cumsum(self._columns.lengths[list(micro.samples)])[:-1]
            parts = zip(np.split(routes.ids, ends), np.split(routes.valid, ends), strict=True)
            self._kept |= dict(zip(micro.samples, parts, strict=True))

    def rows_for(self, micro: MicroBatch, shift: int = 0, measure: bool = False) -> ReplayRows | RecordRows | None:
        """Routes of a micro-batch's tokens, the last ones of samples too; None before any were kept."""
        if self._recording:
            return RecordRows()
        if not self._kept:
            return None
        ids, valid = (np.concatenate(parts) for parts in zip(*(self._kept[s] for s in micro.samples), strict=True))
        return ReplayRows(ids, valid, self._layer_ids, measure)

    def count(self, micro: MicroBatch, usage) -> None:
        """Adds what a pass replayed."""
        self._counts.add(micro.batch.total, usage)

    def figures(self, team: Team) -> dict[str, float]:
        """Counts of all data ranks as metrics."""
        return self._counts.figures(team)
