"""Log-probabilities and entropies from hidden states, without ever holding the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime_trainer.policy._logits import add_product, gradient, products, statistics

__all__ = ["token_logprobs"]

_CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Most float32 logits held at once: 256 MiB and 1 GiB."""


_NOTHING = -1e30
"""Largest logit of a rank without any; finite, so that no difference of two is undefined."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk: int | None = None,
    group: Any = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, from float32 logits.

    Args:
        hidden: [rows, hidden].
        weight: [vocab, hidden], the output head, or this rank's part of it, which may have no rows.
        targets: int64 [rows].
        temperature: float32 [rows], > 0; divides the logits.
        chunk: rows whose logits are held at once; chosen by memory when None.
        group: process group over which the vocabulary is cut. All ranks pass the same rows and get the same results; the
            gradient of `hidden` is this rank's part.
        first: token id of the first row of `weight`.

    Returns:
        float32 [rows] log-probabilities and float32 [rows] entropies in nats, both differentiable once.
    """
    rows = chunk or max(1, _CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26) // max(1, weight.size(0)))
    return _TokenLogprobs.apply(hidden, weight, targets - first, temperature, rows, group)  # type: ignore[return-value]


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the log-normaliser and entropy of each row and computes the logits again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.size(0)
        found = torch.zeros(4, rows, dtype=torch.float32, device=hidden.device)
        found[1] = _NOTHING
        for start in range(0, rows, chunk) if weight.size(0) else ():
            part = slice(start, start + chunk)
            own = targets[part] if group is None else targets[part].clamp(0, weight.size(0) - 1)
            found[:, part] = torch.stack(statistics(products(hidden[part], weight), own, temperature[part]))
        if group is not None:
            found = _merge(found, (targets >= 0) & (targets < weight.size(0)), group)
        chosen, highest, total, mean = found.unbind()
        spread = total.log()
        norms = highest + spread
        logprobs = chosen - spread
        entropy = spread - mean / total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, temperature, norms, entropy)
        ctx.chunk = chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, temperature, norms, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        up = torch.zeros_like(norms) if grad_logprobs is None else grad_logprobs
        if not weight.size(0):
            return torch.zeros_like(hidden), grad_weight.to(weight.dtype), None, None, None, None
        for start in range(0, hidden.size(0), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad = gradient(
                products(hidden[part], weight),
                targets[part],
                temperature[part],
                norms[part],
                up[part],
                None if grad_entropy is None else grad_entropy[part],
                entropy[part],
                hidden.dtype,
            )
            grad_hidden[part] = grad @ weight
            add_product(grad_weight, grad.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _merge(mine: Tensor, inside: Tensor, group: Any) -> Tensor:
    """The statistics [4, rows] of the whole vocabulary from those of its parts.

    Args:
        mine: as `statistics` returns them.
        inside: bool [rows], whether the target is in this part.
    """
    mine = torch.cat((mine, inside[None].float()))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    chosen, highest, total, mean, inside = torch.stack(parts).unbind(1)
    top = highest.amax(0)
    lower = highest - top
    scale = lower.exp()
    chosen = torch.where(inside > 0, chosen + lower, 0.0).sum(0)
    return torch.stack((chosen, top, (scale * total).sum(0), (scale * (mean + total * lower)).sum(0)))
