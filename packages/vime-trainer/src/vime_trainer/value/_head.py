"""The value head, in the place of a language model's output head."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from vime_trainer import megatron
from vime_trainer.models import Architecture, Entry, Family, HfConfig, Weight, expand

__all__ = ["HEAD", "ValueHead", "attach_head", "critic_weights", "table_with_head", "untied"]

HEAD = "score.weight"
"""Its Hugging Face name, as in the ForSequenceClassification models of transformers with one label: [1, hidden]."""

_PLACE = "output_layer"


class ValueHead(torch.nn.Linear):
    """[..., hidden] to float32 [...]. Whole on every tensor-parallel rank, each of which computes all of it."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hidden, 1, bias=False, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiplies in float32 and adds up."""
        return hidden.float() @ self.weight.float()[0]


def untied(arch: Architecture) -> Architecture:
    """The sizes of a critic: no head over the vocabulary that could share the embedding's weights."""
    return dataclasses.replace(arch, tied=False)


def attach_head(chunks: list[Any], arch: Architecture, dtype: torch.dtype) -> None:
    """Puts a value head into the chunk that has the output head, in its place."""
    for chunk in chunks:
        if chunk.post_process:
            setattr(chunk, _PLACE, ValueHead(arch.hidden, dtype, megatron.device()))


def table_with_head(weights: tuple[Weight, ...], arch: Architecture) -> list[Entry]:
    """The weight table of a critic: the value head's row instead of the output head's."""
    name = f"{_PLACE}.weight"
    return [
        dataclasses.replace(entry, hf=(HEAD,), shapes=((1, arch.hidden),), cut="none")
        if entry.megatron == name
        else entry
        for entry in expand(weights, arch)
    ]


def critic_weights(family: Family, config: HfConfig) -> tuple[Architecture, list[Entry]]:
    """Sizes and weight table of a critic that starts from a language model of this family and configuration."""
    arch = untied(family.architecture(config))
    return arch, table_with_head(family.weights, arch)
