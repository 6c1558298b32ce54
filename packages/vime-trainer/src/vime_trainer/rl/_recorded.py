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
        self._kept: dict[int, np.ndarray] = {}
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
            parts = np.split(routes.ids, np.cumsum(self._columns.lengths[list(micro.samples)])[:-1])
            self._kept |= dict(zip(micro.samples, parts, strict=True))

    def rows_for(self, micro: MicroBatch, shift: int = 0, measure: bool = False) -> ReplayRows | RecordRows | None:
        """Routes of a micro-batch's tokens, the last ones of samples too; None before any were kept."""
        if self._recording:
            return RecordRows()
        if not self._kept:
            return None
        ids = np.concatenate([self._kept[sample] for sample in micro.samples])
        return ReplayRows(ids, np.ones(len(ids), bool), self._layer_ids, measure)

    def count(self, micro: MicroBatch, rows: ReplayRows, usage) -> None:
        """Adds what a pass replayed."""
        self._counts.add(len(rows.ids), len(rows.ids), 0, usage)

    def figures(self, team: Team) -> dict[str, float]:
        """Counts of all data ranks as metrics."""
        return self._counts.figures(team)
