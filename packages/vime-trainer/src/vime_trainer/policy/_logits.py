"""Arithmetic on a chunk of float32 logits: in place on the CPU, one kernel each on a GPU.

Sums over the vocabulary come apart into a largest entry and sums relative to it, so parts of a vocabulary can be merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.fused import fuse, switches

__all__ = ["add_product", "gradient", "products", "statistics"]

_LOWEST = -1e4
"""Log-probabilities below it count as this, whose exponential is 0 too, so that 0 x -inf cannot arise."""


def products(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32 [rows, vocab]. Products of bfloat16 numbers are exact in float32, so only the sums must be float32."""
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return hidden.float() @ weight.float().t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in float32 on a GPU; `total` is float32."""
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    elif right.is_cuda and switches.logprobs:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    elif right.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=torch.float32))
    else:
        total.add_(left @ right)


def statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What log-probability and entropy need of z = logits / temperature; overwrites `logits`.

    Args:
        logits: float32 [rows, vocab].
        targets: int64 [rows].
        temperature: float32 [rows].

    Returns:
        Each float32 [rows]: z of the target relative to the largest z, the largest z, the sum of exp(z - largest), and
        the sum of exp(z - largest) * (z - largest).
    """
    if logits.is_cuda and switches.logprobs:
        return _statistics(logits, targets, temperature)
    logits.div_(temperature[:, None])
    highest = logits.amax(-1)
    logits.sub_(highest[:, None])
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    logits.clamp_(min=_LOWEST)
    weights = logits.exp()
    total = weights.sum(-1)
    return chosen, highest, total, weights.mul_(logits).sum(-1)


@fuse("logprobs")
def _statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scaled = logits / temperature[:, None]
    highest = scaled.amax(-1)
    chosen = logits.gather(1, targets[:, None]).squeeze(1) / temperature - highest
    relative = (scaled - highest[:, None]).clamp(min=_LOWEST)
    weights = relative.exp()
    return chosen, highest, weights.sum(-1), (weights * relative).sum(-1)


def gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    norms: Tensor,
    up: Tensor,
    up_entropy: Tensor | None,
    entropy: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient with respect to the logits before the temperature; overwrites `logits`.

    Args:
        logits: float32 [rows, vocab].
        targets, temperature: as above; a target that is no column adds nothing.
        norms: float32 [rows], logarithm of the sum of exp(z).
        up, up_entropy: float32 [rows], gradients with respect to log-probability and entropy; None is no entropy in the loss.
        entropy: float32 [rows].
        dtype: of the result.

    Returns:
        [rows, vocab].
    """
    if logits.is_cuda and switches.logprobs:
        return _gradient(logits, targets, temperature, norms, up, up_entropy, entropy, dtype)
    logp = logits.div_(temperature[:, None]).sub_(norms[:, None])
    if up_entropy is None:
        grad = logp.exp_().mul_(-up[:, None])
    else:
        logp.clamp_(min=_LOWEST)
        surprise = (logp + entropy[:, None]).mul_(up_entropy[:, None]).add_(up[:, None])
        grad = surprise.mul_(logp.exp_()).neg_()
    inside = (targets >= 0) & (targets < grad.size(1))
    grad.scatter_add_(1, targets.clamp(0, grad.size(1) - 1)[:, None], (up * inside)[:, None])
    return grad.div_(temperature[:, None]).to(dtype)


@fuse("logprobs")
def _gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    norms: Tensor,
    up: Tensor,
    up_entropy: Tensor | None,
    entropy: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    logp = (logits / temperature[:, None] - norms[:, None]).clamp(min=_LOWEST)
    factor = up[:, None]
    if up_entropy is not None:
        factor = factor + up_entropy[:, None] * (logp + entropy[:, None])
    columns = torch.arange(logits.size(1), device=logits.device)
    own = torch.where(columns == targets[:, None], up[:, None], 0.0)
    return ((own - logp.exp() * factor) / temperature[:, None]).to(dtype)
