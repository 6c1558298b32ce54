"""A model family's weights as a table, and the table of one model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._rules import COPY, Rule

__all__ = ["Entry", "Weight", "expand"]

Where = Literal["once", "untied", "layer", "dense", "moe"]


@dataclass(frozen=True)
class Weight:
    """One row: a Megatron parameter and the Hugging Face tensors that it is made of.

    Attributes:
        megatron: name, with {layer} where it is one a layer.
        hf: names, with {layer}; a name with {expert} stands for one tensor an expert, all names of expert 0 first.
        rule: change of layout between the two.
        where: once a model, once when the head is not tied, in every layer, in dense layers, in MoE layers.
    """

    megatron: str
    hf: tuple[str, ...]
    rule: Rule = COPY
    where: Where = "layer"


@dataclass(frozen=True)
class Entry:
    """A row for one layer of one model: full names."""

    megatron: str
    hf: tuple[str, ...]
    rule: Rule


def expand(weights: Iterable[Weight], arch: Architecture) -> list[Entry]:
    """The table of one model: what comes once, then layer by layer, each layer's tensors together."""
    weights = tuple(weights)
    once = [w for w in weights if w.where == "once" or (w.where == "untied" and not arch.tied)]
    entries = [Entry(w.megatron, w.hf, w.rule) for w in once]
    for layer in range(arch.layers):
        kind = "moe" if layer in arch.moe_layers else "dense"
        for weight in weights:
            if weight.where in ("layer", kind):
                entries.append(Entry(weight.megatron.format(layer=layer), _names(weight, layer, arch), weight.rule))
    return entries


def _names(weight: Weight, layer: int, arch: Architecture) -> tuple[str, ...]:
    experts = range(arch.experts) if any("{expert}" in name for name in weight.hf) else range(1)
    return tuple(name.format(layer=layer, expert=expert) for expert in experts for name in weight.hf)
