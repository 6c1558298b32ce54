"""The engine's expert routes, laid out as a micro-batch lays out its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vime_proto.errors import ContractError
from vime_trainer.batch import Columns, MicroBatch, RefusedSamplesError
from vime_trainer.packed import ReplayRows

from ._team import Team

_COUNTS = ("rows", "holes", "rows_replayed", "inexact", "rows_flipped", "rows_measured")


class RouteCounts:
    """Counts of rows, all layers of a token being one row, and of the layers' flips: where the model alone would have
    chosen other experts."""

    def __init__(self) -> None:
        self._rows = dict.fromkeys(_COUNTS, 0)
        self._flips: dict[int, int] = {}

    def add(self, rows: int, replayed: int, inexact: int, usage) -> None:
        """Adds a micro-batch.

        Args:
            rows: tokens that can have routes.
            replayed: those whose routes were replayed.
            inexact: those of them that the engine did not compute as it is replayed.
            usage: of the forward pass, see `vime_trainer.packed.TokenOutputs`.
        """
        added = {"rows": rows, "rows_replayed": replayed, "holes": rows - replayed, "inexact": inexact}
        if getattr(usage, "flips", None) is not None:
            added |= {"rows_flipped": int(usage.flipped.sum()), "rows_measured": replayed}
            for layer, flips in zip(usage.layer_ids, usage.flips.tolist(), strict=True):
                self._flips[layer] = self._flips.get(layer, 0) + flips
        for name, value in added.items():
            self._rows[name] += value

    def figures(self, team: Team) -> dict[str, float]:
        """Sums over data ranks under "r3/": the counts, "flip_share" of rows with a flip in any layer, and "agreement" of
        row-layers without, as a whole and for each layer. Every data rank must have measured the same layers, or none."""
        figures = {name: team.total(value) for name, value in self._rows.items()}
        measured = figures.pop("rows_measured")
        if figures["rows_replayed"]:
            figures["flip_share"] = figures["rows_flipped"] / figures["rows_replayed"]
        if measured:
            layers = sorted(set(np.concatenate(team.gather(np.array(sorted(self._flips), np.int64))).tolist()))
            flips = {layer: team.total(self._flips.get(layer, 0)) for layer in layers}
            figures |= {f"agreement/layer_{layer}": 1.0 - count / measured for layer, count in flips.items()}
            if layers:
                figures["agreement"] = 1.0 - sum(flips.values()) / (measured * len(layers))
        return {f"r3/{name}": float(value) for name, value in figures.items()}


class Routes:
    """Decodes the traces of a rank's samples and counts what is replayed.

    Args:
        columns: the batch.
        sample_ids: names, for errors.
        owned: positions of this rank's samples; each of them must bring a trace.
        layers: numbers of the layers to replay here; None for all of a trace.

    Raises:
        RefusedSamplesError: samples without a trace, or whose trace breaks its contract.
    """

    def __init__(self, columns: Columns, sample_ids: tuple[str, ...], owned: Sequence[int], layers=None):
        self._columns = columns
        self._decoded = {}
        refused: dict[str, str] = {}
        for sample in owned:
            name, trace, length = sample_ids[sample], columns.routing[sample], int(columns.lengths[sample])
            if trace is None:
                refused[name] = 'no routing trace, which r3 = "replay" needs; does the engine capture routes?'
                continue
            try:
                self._decoded[sample] = _decode(trace, length - 1, layers)
            except ContractError as error:
                refused[name] = f"routing: {error}"
        if refused:
            raise RefusedSamplesError(refused)
        self._counts = RouteCounts()

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

    def count(self, micro: MicroBatch, replayed: ReplayRows, usage) -> None:
        """Adds what a forward pass with these rows replayed."""
        samples = list(micro.samples)
        rows = int((self._columns.lengths[samples] - 1).sum())
        inexact = sum(
            int(np.count_nonzero(route.valid & ~route.exact)) for route in (self._decoded[s] for s in samples)
        )
        self._counts.add(rows, int(np.count_nonzero(replayed.valid)), inexact, usage)

    def figures(self, team: Team) -> dict[str, float]:
        """Counts of all data ranks as metrics."""
        return self._counts.figures(team)


def _decode(trace, rows: int, layers: Sequence[int] | None):
    """Routes of some layers; a trace may bring more, as those of pipeline chunks between them."""
    from vime_r3.trace import decode

    routes = decode(trace, rows=rows)
    if layers is None or tuple(layers) == routes.layer_ids:
        return routes
    missing = sorted(set(layers) - set(routes.layer_ids))
    if missing:
        raise ContractError("header.layer_ids", f"no routes of layer {missing[0]}; there are {list(routes.layer_ids)}")
    places = [routes.layer_ids.index(layer) for layer in layers]
    return dataclasses.replace(routes, ids=routes.ids[:, places], layer_ids=tuple(layers))
