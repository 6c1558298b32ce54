"""Log-probabilities and entropies from hidden states, without ever holding the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["token_logprobs"]

_CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Most float32 logits held at once: 256 MiB and 1 GiB."""

_LOWEST = -1e4
"""Log-probabilities below it count as this, whose exponential is 0 too, so that 0 x -inf cannot arise."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, from float32 logits.

    Args:
        hidden: [rows, hidden].
        weight: [vocab, hidden], the output head.
        targets: int64 [rows].
        temperature: float32 [rows], > 0; divides the logits.
        chunk: rows whose logits are held at once; chosen by memory when None.

    Returns:
        float32 [rows] log-probabilities and float32 [rows] entropies in nats, both differentiable once.
    """
    rows = chunk or max(1, _CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26) // weight.size(0))
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, rows)  # type: ignore[return-value]


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32 [rows, vocab]. Products of bfloat16 numbers are exact in float32, so only the sums must be float32."""
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return hidden.float() @ weight.float().t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the log-normaliser and entropy of each row and computes the logits again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.size(0)
        logprobs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        entropy, norms = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight).div_(temperature[part, None])
            norms[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - norms[part]
            logits.sub_(norms[part, None]).clamp_(min=_LOWEST)
            entropy[part] = -torch.linalg.vecdot(logits.exp(), logits)
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
        for start in range(0, hidden.size(0), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = _logits(hidden[part], weight).div_(temperature[part, None]).sub_(norms[part, None])
            if grad_entropy is None:
                grad = logp.exp_().mul_(-up[part, None])
            else:
                logp.clamp_(min=_LOWEST)
                surprise = (logp + entropy[part, None]).mul_(grad_entropy[part, None]).add_(up[part, None])
                grad = surprise.mul_(logp.exp_()).neg_()
            grad.scatter_add_(1, targets[part, None], up[part, None])
            grad = grad.div_(temperature[part, None]).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if weight.dtype == torch.float32 or not grad.is_cuda:
                grad_weight += (grad.t() @ hidden[part]).float()
            else:
                grad_weight += torch.mm(grad.t(), hidden[part], out_dtype=torch.float32)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None
