"""Numbers of parameters, from the families' weight tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vime_trainer.models import Architecture, Entry, padded_vocab
from vime_trainer.plan._layout import Layout

__all__ = ["Parameters", "active", "on_stage", "total"]


@dataclass(frozen=True)
class Parameters:
    """Of one GPU.

    Attributes:
        dense: all but routed experts.
        expert: of routed experts.
        largest: of the largest one.
        frozen: numbers that are kept in float32 and not trained.
    """

    dense: int
    expert: int
    largest: int
    frozen: int

    @property
    def trained(self) -> int:
        return self.dense + self.expert


def total(table: Sequence[Entry]) -> int:
    """Trained parameters of the model, without padding, tied ones once."""
    return sum(_count(entry) for entry in table if not entry.float32)


def active(table: Sequence[Entry], arch: Architecture) -> int:
    """Those that one token meets: routed experts count top_k times."""
    experts = sum(_count(entry) for entry in table if entry.experts)
    return total(table) - (experts - experts * arch.top_k // arch.experts if experts else 0)


def on_stage(table: Sequence[Entry], arch: Architecture, layout: Layout, stage: int) -> Parameters:
    """Parameters of a GPU of one pipeline stage."""
    layers = set(layout.stage_layers(stage))
    first, last = stage == 0, stage == layout.pipeline - 1
    dense, expert, frozen, largest = 0, 0, 0, 0
    for entry in table:
        embedding = entry.megatron.startswith("embedding.")
        # A tied head on another stage than the embedding is a copy of it.
        here = (first or (last and arch.tied)) if embedding else last
        if not (here if entry.layer is None else entry.layer in layers):
            continue
        size = _local(entry, layout)
        if entry.float32:
            frozen += size
            continue
        largest = max(largest, size)
        if entry.experts:
            expert += size
        else:
            dense += size
    return Parameters(dense, expert, largest, frozen)


def _count(entry: Entry) -> int:
    return sum(math.prod(shape) for shape in entry.shapes)


def _local(entry: Entry, layout: Layout) -> int:
    if entry.experts:
        return _count(entry) // (layout.expert * layout.expert_tensor)
    if entry.cut == "none":
        return _count(entry)
    if entry.cut == "vocabulary":
        rows, width = entry.shapes[0]
        return padded_vocab(rows, layout.tensor) // layout.tensor * width
    return _count(entry) // layout.tensor
