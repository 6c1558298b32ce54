"""A model family's weights as a table, and the table of one model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._rules import COPY, Rule

__all__ = ["Cut", "Entry", "HfTensor", "Weight", "expand"]

Where = Literal["once", "untied", "layer", "dense", "moe"]
Cut = Literal["none", "columns", "rows", "vocabulary"]


class HfTensor(NamedTuple):
    """A tensor of a Hugging Face checkpoint.

    Attributes:
        name: with {layer} where it is one a layer and {expert} where it is one an expert.
        dims: words of `Architecture.size`, separated by spaces, such as "hidden ffn".
    """

    name: str
    dims: str


@dataclass(frozen=True)
class Weight:
    """One row: a Megatron parameter and the Hugging Face tensors that it is made of.

    Attributes:
        megatron: name, with {layer} where it is one a layer.
        hf: its tensors; one with {expert} in its name stands for one an expert, all tensors of expert 0 first.
        rule: change of layout between the two.
        cut: what tensor-parallel ranks hold of each Hugging Face tensor: all of it, equal parts of its outputs
            ("columns", after Megatron's ColumnParallelLinear) or of its inputs ("rows"), or of a vocabulary padded to a
            multiple of the ranks. Routed experts are spread over expert-parallel ranks and cut over expert-tensor ranks.
        where: once a model, once when the head is not tied, in every layer, in dense layers, in MoE layers.
        needs: attribute of the architecture without which the row is left out.
        float32: stays in float32 whatever the model's element type.
    """

    megatron: str
    hf: tuple[HfTensor, ...]
    rule: Rule = COPY
    cut: Cut = "none"
    where: Where = "layer"
    needs: str | None = None
    float32: bool = False


@dataclass(frozen=True)
class Entry:
    """A row for one layer of one model: full names.

    Attributes:
        megatron: name with the global layer number.
        hf: names of the Hugging Face tensors.
        shapes: theirs.
        rule, cut, float32: as in Weight.
        layer: global number, counted from 0; None for what comes once a model.
        experts: routed experts that the names run over; 0 when they do not.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rule: Rule
    cut: Cut
    float32: bool
    layer: int | None
    experts: int


def expand(weights: Iterable[Weight], arch: Architecture) -> list[Entry]:
    """The table of one model: what comes once, then layer by layer, each layer's tensors together."""
    weights = [weight for weight in weights if weight.needs is None or getattr(arch, weight.needs)]
    entries = [_entry(w, arch) for w in weights if w.where == "once" or (w.where == "untied" and not arch.tied)]
    for layer in range(arch.layers):
        kind = "moe" if layer in arch.moe_layers else "dense"
        entries += [_entry(weight, arch, layer) for weight in weights if weight.where in ("layer", kind)]
    return entries


def _entry(weight: Weight, arch: Architecture, layer: int | None = None) -> Entry:
    routed = any("{expert}" in tensor.name for tensor in weight.hf)
    copies = [
        (tensor.name.format(layer=layer, expert=expert), tuple(arch.size(word) for word in tensor.dims.split()))
        for expert in range(arch.experts if routed else 1)
        for tensor in weight.hf
    ]
    return Entry(
        weight.megatron.format(layer=layer),
        tuple(name for name, _ in copies),
        tuple(shape for _, shape in copies),
        weight.rule,
        weight.cut,
        weight.float32,
        layer,
        arch.experts if routed else 0,
    )
