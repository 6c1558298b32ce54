"""Which of the engine's routes a rank needs: rows of the tokens that its routers see in a pass, in its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ._backend import Backend
from ._share import rows_of

Range = tuple[int, int]


@dataclass(frozen=True)
class ReplayedPass:
    """A pass over a batch that replays routes.

    Attributes:
        micro_batches: this data rank's, as lists of samples.
        shift: routes are moved by so many rows within each sample.
    """

    micro_batches: Sequence[Sequence[int]]
    shift: int = 0


@dataclass(frozen=True)
class NeededRoutes:
    """What a rank needs of the traces of a batch.

    Attributes:
        layers: numbers of its MoE layers, ascending; None for all of a trace.
        layer_ranges: ranges [start, stop) of layer numbers that have these and no others; one without virtual stages.
        tokens: bool [T of the batch]; tokens whose rows it needs.
        rows: for each sample of the batch ranges [start, stop) of rows, ascending and disjoint.
    """

    layers: tuple[int, ...] | None
    layer_ranges: list[Range] | None
    tokens: np.ndarray
    rows: list[list[Range]]


def needed_routes(lengths: np.ndarray, backend: Backend, passes: Iterable[ReplayedPass]) -> NeededRoutes:
    """The union over all passes: each of them cuts the batch otherwise, and so gives a rank other tokens of a sample.

    All ranks call this together.

    Args:
        lengths: int64 [S], tokens of each sample of the batch.
        backend: says which tokens of a micro-batch this rank routes.
        passes: those that are going to be made.
    """
    from vime_r3.shards import layer_ranges, row_ranges

    starts = np.cumsum(lengths) - lengths
    needed = np.zeros(int(lengths.sum()), bool)
    for one in passes:
        if not one.micro_batches:
            continue
        # A micro-batch without samples is made of one token.
        found = backend.routed_tokens([lengths[list(micro)].tolist() or [1] for micro in one.micro_batches])
        for micro, places in zip(one.micro_batches, found, strict=True):
            if not micro:
                continue
            rows = rows_of(starts, lengths, micro)
            needed[rows[places]] = True
            if one.shift:
                inside = rows - np.repeat(starts[list(micro)], lengths[list(micro)])
                needed[rows[places[inside[places] >= one.shift]] - one.shift] = True
    layers = backend.routed_layers
    ranges = None if layers is None else layer_ranges(layers, backend.moe_layers or layers)
    return NeededRoutes(layers, ranges, needed, row_ranges(np.flatnonzero(needed), lengths.tolist()))
