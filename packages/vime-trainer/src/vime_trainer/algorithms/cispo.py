"""CISPO (arXiv:2506.13585): clipped, detached importance weights on the policy gradient; no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._objectives import log_ratio, ratio_metrics
from ._types import Algorithm, Streams, Terms
from .grpo import advantage

if TYPE_CHECKING:
    import torch


def loss(logprobs: torch.Tensor, entropy: torch.Tensor, streams: Streams, settings) -> Terms:
    """-clip(ratio, 1 - low, 1 + high) x advantage x log-prob, the clipped ratio being a constant."""
    old = streams.old_logprobs(logprobs)
    ratio = log_ratio(logprobs, old).exp().detach()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    terms = -weight * streams["advantages"] * logprobs
    return Terms(terms, ratio_metrics(logprobs, old, ratio, weight != ratio))


# The lower bound is off, as in the paper.
CISPO = Algorithm("cispo", advantage, loss, defaults={"clip_low": 1.0, "clip_high": 5.0})
