"""The engine's expert routes, laid out as a micro-batch lays out its tokens."""

from __future__ import annotations

import numpy as np

from vime_proto.errors import ContractError
from vime_trainer.batch import Columns, MicroBatch, RefusedSamplesError
from vime_trainer.packed import ReplayRows

_COUNTS = ("rows", "holes", "rows_replayed", "inexact", "rows_flipped")


class Routes:
    """Decodes the traces of one batch and counts what is replayed.

    Args:
        columns: the batch; every sample must bring a trace.
        sample_ids: names, for errors.

    Raises:
        RefusedSamplesError: samples without a trace, or whose trace breaks its contract.
    """

    def __init__(self, columns: Columns, sample_ids: tuple[str, ...]):
        from vime_r3.trace import decode

        self._columns = columns
        self._decoded = []
        refused: dict[str, str] = {}
        for name, trace, length in zip(sample_ids, columns.routing, columns.lengths.tolist(), strict=True):
            if trace is None:
                refused[name] = 'no routing trace, which r3 = "replay" needs; does the engine capture routes?'
                continue
            try:
                self._decoded.append(decode(trace, rows=length - 1))
            except ContractError as error:
                refused[name] = f"routing: {error}"
        if refused:
            raise RefusedSamplesError(refused)
        self.counts = dict.fromkeys(_COUNTS, 0)

    def rows_for(self, micro: MicroBatch, shift: int = 0, measure: bool = False) -> ReplayRows:
        """Routes of a micro-batch's tokens.

        Args:
            shift: move routes by so many rows within each sample, to see that a wrong row shows.
            measure: count where the model alone would have chosen otherwise; see `count`.
        """
        from vime_r3.layout import pack

        routes = [self._decoded[sample] for sample in micro.samples]
        ids, valid = pack(routes, self._columns.lengths[list(micro.samples)].tolist())
        if shift:
            source = np.maximum(np.arange(len(ids)) - shift, 0)
            # The first rows of a sample have nobody before them: they keep their own.
            starts = micro.batch.positions.numpy() < shift
            source[starts] = np.arange(len(ids))[starts]
            ids, valid = ids[source], valid[source] & valid
        return ReplayRows(ids, valid, routes[0].layer_ids, measure)

    def count(self, micro: MicroBatch, rows: ReplayRows, usage) -> None:
        """Adds what a forward pass with these rows replayed: row by row, all layers of a token being one row."""
        lengths = self._columns.lengths[list(micro.samples)]
        total = int((lengths - 1).sum())
        replayed = int(np.count_nonzero(rows.valid))
        self.counts["rows"] += total
        self.counts["rows_replayed"] += replayed
        self.counts["holes"] += total - replayed
        self.counts["inexact"] += sum(
            int(np.count_nonzero(route.valid & ~route.exact)) for route in (self._decoded[s] for s in micro.samples)
        )
        flipped = getattr(usage, "flipped", None)
        if flipped is not None:
            self.counts["rows_flipped"] += int(flipped.sum())

    def figures(self) -> dict[str, float]:
        """Counts as metrics."""
        figures = {f"r3/{name}": float(value) for name, value in self.counts.items()}
        if self.counts["rows_replayed"]:
            figures["r3/flip_share"] = self.counts["rows_flipped"] / self.counts["rows_replayed"]
        return figures
