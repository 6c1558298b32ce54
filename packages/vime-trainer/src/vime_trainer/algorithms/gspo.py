"""GSPO (arXiv:2507.18071): the importance ratio of a sequence is the geometric mean of its tokens' ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._objectives import clipped, log_ratio, ratio_metrics
from ._types import Algorithm, Streams, Terms
from .grpo import advantage

if TYPE_CHECKING:
    import torch


def loss(logprobs: torch.Tensor, entropy: torch.Tensor, streams: Streams, settings) -> Terms:
    """min(s A, clip(s) A) on each of the sequence's tokens, s = exp(mean of the tokens' log-ratios)."""
    old = streams.old_logprobs(logprobs)
    ratio = streams.to_tokens(streams.sequence_mean(log_ratio(logprobs, old)).exp())
    terms, cut = clipped(ratio, streams["advantages"], settings.clip_low, settings.clip_high, settings.clip_dual)
    return Terms(terms, ratio_metrics(logprobs, old, ratio, cut))


def token_loss(logprobs: torch.Tensor, entropy: torch.Tensor, streams: Streams, settings) -> Terms:
    """The same value, with s_t = sg(s) pi / sg(pi): each token's gradient is its own, so advantages may differ by token."""
    old = streams.old_logprobs(logprobs)
    ratio = streams.to_tokens(streams.sequence_mean(log_ratio(logprobs, old)).exp()).detach()
    ratio = ratio * (logprobs - logprobs.detach()).exp()
    terms, cut = clipped(ratio, streams["advantages"], settings.clip_low, settings.clip_high, settings.clip_dual)
    return Terms(terms, ratio_metrics(logprobs, old, ratio, cut))


_OWN = {"aggregation": "sequence", "defaults": {"clip_low": 3e-4, "clip_high": 4e-4}}
GSPO = Algorithm("gspo", advantage, loss, **_OWN)
GSPO_TOKEN = Algorithm("gspo_token", advantage, token_loss, **_OWN)
