"""Transformer Engine's names of weights, as the names of the weight tables.

Its layers hold the same numbers in other places: a norm before a matrix belongs to the matrix, and every routed expert
has a parameter of its own. The tables, and the files of checkpoints, know one name for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["PerExpert", "stored_key", "table_name", "table_weights"]

_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"^(decoder\.layers\.\d+\.)(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.linear_(fc[12])\.weight(\d+)$")


class PerExpert:
    """Parameters of the experts of one rank, seen as the one stacked parameter of a weight table.

    It has what weight tables ask of a Tensor. Reading copies: the parameters may lie anywhere.

    Args:
        parts: of one shape, by expert.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts)

    @property
    def shape(self) -> torch.Size:
        """[experts, ...]."""
        return torch.Size((len(self.parts), *self.parts[0].shape))

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts)

    def copy_(self, whole: Tensor | PerExpert) -> PerExpert:
        """Sets every part.

        Raises:
            ValueError: another number of experts.
        """
        for part, value in zip(self.parts, whole, strict=True):
            part.copy_(value)
        return self

    def detach(self) -> Tensor:
        """[experts, ...], a copy."""
        return torch.stack([part.detach() for part in self.parts])


def table_name(name: str) -> tuple[str, int | None]:
    """The weight table's name of a parameter, and the expert that it is of where it is one of several.

    Args:
        name: Megatron's, of a layer of either kind. Layer numbers and names of anything else stay as they are.

    Returns:
        The name, and the number of the expert on its rank; None for a whole parameter.
    """
    match = _LAYER.match(name)
    if match is None:
        return name, None
    layer, rest = match.groups()
    if expert := _EXPERT.match(rest):
        return f"{layer}mlp.experts.{expert[1]}", int(expert[2])
    return layer + _NORMS.get(rest, rest), None


def table_weights(found: Mapping[str, Tensor]) -> dict[str, Tensor | PerExpert]:
    """Weights by the names of the weight tables; what has those names already is the same object.

    Args:
        found: by Megatron's names, those of one rank.
    """
    weights: dict[str, Tensor | PerExpert] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, value in found.items():
        name, expert = table_name(name)
        weights[name] = value
        if expert is not None:
            experts.setdefault(name, {})[expert] = value
    for name, parts in experts.items():
        weights[name] = PerExpert([parts[number] for number in range(len(parts))])
    return weights


def stored_key(key: str) -> str:
    """The name under which checkpoints keep what Megatron's sharded state dict calls `key`, of a layer of either kind."""
    key = key.replace(".mlp.experts.experts.linear_fc1.weight", ".mlp.experts.fc1")
    key = key.replace(".mlp.experts.experts.linear_fc2.weight", ".mlp.experts.fc2")
    return key.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
