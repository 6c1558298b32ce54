"""How tensors of a Hugging Face checkpoint become one Megatron parameter, and back. Views where possible.

Every rule serves whole tensors and one rank's part of them alike: ranks hold whole heads, and equal parts of what is
stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vime_trainer.models._architecture import Architecture

__all__ = ["COPY", "EXPERT_DOWN", "EXPERT_GATE_UP", "GATE_UP", "QKV", "Rule"]


class Rule(Protocol):
    """A lossless change of layout; `split(merge(x)) == x` bit by bit. Works on meta tensors too."""

    def merge(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        """Hugging Face tensors, in the order in which the weight names them, to the Megatron parameter."""
        ...

    def split(self, whole: Tensor, arch: Architecture) -> list[Tensor]:
        """The Megatron parameter to Hugging Face tensors, in the same order."""
        ...


class _Copy:
    def merge(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, arch: Architecture) -> list[Tensor]:
        return [whole]


class _GateUp:
    """[gate; up] along the rows."""

    def merge(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor, arch: Architecture) -> list[Tensor]:
        return list(whole.chunk(2))


class _Qkv:
    """Per KV group: the rows of its query heads, of its key head, of its value head. Serves weights and biases."""

    def merge(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        groups = parts[1].shape[0] // arch.head_dim
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: Tensor, arch: Architecture) -> list[Tensor]:
        sizes = [arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim, arch.head_dim]
        grouped = whole.view(-1, sum(sizes), *whole.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


class _ExpertGateUp:
    """gate 0, up 0, gate 1, up 1, ... to [experts, 2 * width, hidden]."""

    def merge(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        return torch.cat(list(parts)).view(len(parts) // 2, -1, parts[0].shape[-1])

    def split(self, whole: Tensor, arch: Architecture) -> list[Tensor]:
        return [half for expert in whole.unbind() for half in expert.chunk(2)]


class _ExpertDown:
    """down 0, down 1, ... to [experts, hidden, width]."""

    def merge(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        return torch.stack(list(parts))

    def split(self, whole: Tensor, arch: Architecture) -> list[Tensor]:
        return list(whole.unbind())


COPY: Rule = _Copy()
GATE_UP: Rule = _GateUp()
QKV: Rule = _Qkv()
EXPERT_GATE_UP: Rule = _ExpertGateUp()
EXPERT_DOWN: Rule = _ExpertDown()
