"""Weights of this rank by names with global layer numbers, and which ranks hold the parts of each weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vime_trainer.megatron import Parallel
from vime_trainer.models import Entry, check_names

__all__ = ["TIED_HEAD", "find_holders", "globally", "own_entries"]

TIED_HEAD = "output_layer.weight"
"""The copy of a tied embedding that the last of several pipeline stages keeps."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def globally(chunk: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Names of a chunk, which counts its layers from 0, to names of the whole model."""

    def number(match: re.Match[str]) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    return {_LAYER.sub(number, name): value for name, value in found.items()}


def own_entries(entries: Sequence[Entry], names: Sequence[str], here: Parallel) -> list[Entry]:
    """The rows of the weight table that this rank holds a part of.

    Raises:
        ValueError: weights that the table lacks, or in one process a row without a weight.
    """
    table = {entry.megatron for entry in entries}
    extra = {TIED_HEAD} if here.pipeline_size > 1 and TIED_HEAD not in table else set()
    held = set(names) - extra
    check_names(table if here.pipeline_size == 1 else held & table, held, "weight table")
    return [entry for entry in entries if entry.megatron in held]


def find_holders(entries: Sequence[Entry], names: Sequence[str], here: Parallel) -> list[list[int]]:
    """For each row of the table the ranks that together hold it once, in the order that `models.join` takes. Collective.

    Raises:
        ValueError: a row that no rank holds.
    """
    held = set(names)
    rows = here.gather(np.array([entry.megatron in held for entry in entries], dtype=np.uint8))
    holders = []
    for index, entry in enumerate(entries):
        ranks = [rank for rank in range(here.world) if rows[rank][index]]
        if not ranks:
            raise ValueError(f"weight table: no rank holds {entry.megatron}")
        holders.append(_once(entry, ranks, here))
    return holders


def _once(entry: Entry, ranks: list[int], here: Parallel) -> list[int]:
    where = here.coordinates
    if entry.experts:
        once = [rank for rank in ranks if where[rank].expert_data == 0]
        if entry.cut == "none":
            once = [rank for rank in once if where[rank].expert_tensor == 0]
        return sorted(once, key=lambda rank: (where[rank].expert, where[rank].expert_tensor))
    if entry.cut == "none":
        return ranks[:1]
    once = [rank for rank in ranks if where[rank].data == 0 and where[rank].context == 0]
    return sorted(once, key=lambda rank: where[rank].tensor)
