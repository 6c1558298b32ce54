"""Rotary positions in one kernel, with sines and cosines worked out once a pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime_trainer.fused import fuse

__all__ = ["Turns", "turn", "turns_of"]

Turns = tuple[Tensor, Tensor]
"""Cosines and sines, each [tokens, half]; the first 2 * half numbers of a head are turned, pairwise half apart."""


def turns_of(angles: Tensor, dtype: torch.dtype) -> Turns:
    """From Megatron's table of angles, [tokens, 1, 1, 2 * half] of two equal halves. Rounded to `dtype`, as Megatron does."""
    half = angles.flatten(1).chunk(2, dim=-1)[0]
    return half.cos().to(dtype), half.sin().to(dtype)


def turn(heads: Tensor, turns: Turns) -> Tensor:
    """Turned queries or keys, [tokens, heads, head_dim]; backward keeps sines and cosines alone."""
    return _Turn.apply(heads, *turns)  # type: ignore[no-any-return]


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


@fuse("rope")
def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    parts = [(first * cos - second * sin).to(heads.dtype), (second * cos + first * sin).to(heads.dtype)]
    return torch.cat([*parts, heads[..., 2 * half :]], dim=-1)
