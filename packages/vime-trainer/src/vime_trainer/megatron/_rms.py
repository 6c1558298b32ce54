"""RMSNorm of rows: torch's on the CPU, one kernel each way on a GPU, where short rows such as heads are many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vime_trainer.fused import fuse, switches

__all__ = ["rms_norm"]


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden / root mean square * weight over the last dimension; on a GPU backward keeps `hidden` alone."""
    if hidden.is_cuda and switches.norm:
        return _RmsNorm.apply(hidden, weight, eps)  # type: ignore[no-any-return]
    return functional.rms_norm(hidden, weight.shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return _forward(hidden.reshape(-1, hidden.size(-1)), weight, eps).view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight = ctx.saved_tensors
        rows = [tensor.reshape(-1, hidden.size(-1)) for tensor in (hidden, grad)]
        grad_hidden, grad_weight = _backward(rows[0], weight, rows[1], ctx.eps)
        return grad_hidden.view(hidden.shape), grad_weight, None


@fuse("norm")
def _forward(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = rows.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(rows.dtype)


@fuse("norm")
def _backward(rows: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide, grad = rows.float(), grad.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = wide * scale
    weighted = grad * weight.float()
    grad_rows = scale * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    return grad_rows.to(rows.dtype), (grad * unit).sum(0).to(weight.dtype)
