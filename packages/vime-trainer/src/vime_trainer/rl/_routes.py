"""The engine's expert routes, laid out as a micro-batch lays out its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vime_proto.errors import ContractError
from vime_trainer.batch import Columns, MicroBatch, RefusedSamplesError
from vime_trainer.packed import ReplayRows

from ._needed import NeededRoutes
from ._team import Team

_COUNTS = ("rows", "holes", "rows_replayed", "inexact", "rows_flipped")


class RouteCounts:
    """Counts of rows, all layers of a token being one row, and of the layers' flips: where the model alone would have
    chosen other experts."""

    def __init__(self) -> None:
        self._rows = dict.fromkeys(_COUNTS, 0)
        self._flips: dict[int, int] = {}

    def add(self, rows: int, usage) -> None:
        """Adds a micro-batch.

        Args:
            rows: tokens that can have routes, on all ranks.
            usage: what became of them, see `vime_trainer.packed.TokenOutputs`.
        """
        replayed = int((usage.replayed > 0).sum())
        self._rows["rows"] += rows
        self._rows["rows_replayed"] += replayed
        self._rows["holes"] += rows - replayed
        self._rows["inexact"] += 0 if usage.inexact is None else int(usage.inexact.sum())
        self._rows["rows_flipped"] += int(usage.flipped.sum())
        for layer, flips in zip(usage.layer_ids, usage.flips.tolist(), strict=True):
            self._flips[layer] = self._flips.get(layer, 0) + flips

    def figures(self, team: Team) -> dict[str, float]:
        """Sums over data ranks under "r3/": the counts, "flip_share" of rows with a flip in any layer, and "agreement" of
        row-layers without, as a whole and for each layer. Every data rank must have measured the same layers, or none."""
        figures = {name: team.total(value) for name, value in self._rows.items()}
        replayed = figures["rows_replayed"]
        if replayed:
            figures["flip_share"] = figures["rows_flipped"] / replayed
            layers = sorted(set(np.concatenate(team.gather(np.array(sorted(self._flips), np.int64))).tolist()))
            flips = {layer: team.total(self._flips.get(layer, 0)) for layer in layers}
            figures |= {f"agreement/layer_{layer}": 1.0 - count / replayed for layer, count in flips.items()}
            if layers:
                figures["agreement"] = 1.0 - sum(flips.values()) / (replayed * len(layers))
        return {f"r3/{name}": float(value) for name, value in figures.items()}


class Routes:
    """Decodes the traces of a rank's samples, as far as it has fetched them, and counts what all ranks replay.

    Args:
        columns: the batch.
        sample_ids: names, for errors.
        owned: positions of this rank's samples; each of them must bring a trace.
        needed: the rows and layers that were fetched; a trace may bring more.

    Raises:
        RefusedSamplesError: samples without a trace, or whose trace breaks its contract.
    """

    def __init__(self, columns: Columns, sample_ids: tuple[str, ...], owned: Sequence[int], needed: NeededRoutes):
        self._columns = columns
        self._needed = needed
        self._decoded = {}
        self._counts = RouteCounts()
        if needed.layers == ():
            # Another pipeline stage has routers, and looks at the traces.
            return
        refused: dict[str, str] = {}
        for sample in owned:
            name, trace, length = sample_ids[sample], columns.routing[sample], int(columns.lengths[sample])
            if trace is None:
                refused[name] = 'no routing trace, which r3 = "replay" needs; does the engine capture routes?'
                continue
            try:
                self._decoded[sample] = _decode(trace, length - 1, needed.layers)
            except ContractError as error:
                refused[name] = f"routing: {error}"
        if refused:
            raise RefusedSamplesError(refused)

    def rows_for(self, micro: MicroBatch, shift: int = 0, measure: bool = False) -> ReplayRows:
        """Routes of a micro-batch's tokens, of which this rank has those that it needs.

        Args:
            shift: move routes by so many rows within each sample, to see that a wrong row shows.
            measure: count what is replayed, and where the model alone would have chosen otherwise; see `count`.
        """
        from vime_r3.layout import pack

        if self._needed.layers == ():
            tokens = micro.batch.total
            return ReplayRows(np.zeros((tokens, 0, 1), np.uint8), np.zeros(tokens, bool), (), measure)
        routes = [self._decoded[sample] for sample in micro.samples]
        ids, valid = pack(routes, self._columns.lengths[list(micro.samples)].tolist())
        exact = np.concatenate([np.append(route.exact, False) for route in routes])
        fetched = self._needed.tokens[micro.rows]
        if shift:
            source = np.maximum(np.arange(len(ids)) - shift, 0)
            # The first rows of a sample have nobody before them: they keep their own.
            starts = micro.batch.positions.numpy() < shift
            source[starts] = np.arange(len(ids))[starts]
            ids, valid, exact = ids[source], valid[source] & valid, exact[source]
            fetched = fetched[source] & fetched
        return ReplayRows(ids, valid, routes[0].layer_ids, measure, exact, fetched)

    def count(self, micro: MicroBatch, usage) -> None:
        """Adds what a forward pass with these rows replayed, on all ranks that have a part of the micro-batch."""
        self._counts.add(int((self._columns.lengths[list(micro.samples)] - 1).sum()), usage)

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
