"""Gated SiLU of the experts, times each row's routing weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vime_trainer.fused import fuse, switches

__all__ = ["weighted_swiglu"]


def weighted_swiglu(pairs: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight.

    Args:
        pairs: [rows, 2 * width], gate then up.
        weights: [rows].

    Returns:
        [rows, width] of the type of `pairs`. For backward `pairs` and `weights` are kept, nothing between.
    """
    if switches.swiglu:
        return _WeightedSwiglu.apply(pairs, weights)  # type: ignore[return-value]
    gate, up = pairs.chunk(2, dim=-1)
    return (silu(gate) * up * weights.unsqueeze(-1)).to(pairs.dtype)


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(pairs, weights)
        return _forward(pairs, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(*ctx.saved_tensors, grad)


@fuse("swiglu")
def _forward(pairs: Tensor, weights: Tensor) -> Tensor:
    gate, up = pairs.float().chunk(2, dim=-1)
    return (silu(gate) * up * weights.float()[:, None]).to(pairs.dtype)


@fuse("swiglu")
def _backward(pairs: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = pairs.float().chunk(2, dim=-1)
    grad = grad.float()
    active = silu(gate)
    grad_weights = (active * up * grad).sum(-1)
    grad = grad * weights.float()[:, None]
    both = torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * active), -1)
    return both.to(pairs.dtype), grad_weights.to(weights.dtype)
