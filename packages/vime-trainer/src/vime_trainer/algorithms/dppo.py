"""DPPO with the binary total-variation mask (arXiv:2602.04879)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._objectives import log_ratio, ratio_metrics
from ._types import Algorithm, Streams, Terms
from .grpo import advantage

if TYPE_CHECKING:
    import torch


def loss(logprobs: torch.Tensor, entropy: torch.Tensor, streams: Streams, settings) -> Terms:
    """-ratio x advantage, without the tokens whose probability has left the engine's by too much, in the wrong direction.

    A token is dropped where A > 0 and pi - mu > clip_high, or A <= 0 and pi - mu < -clip_low: differences of
    probabilities, not of ratios. The mask is detached.
    """
    import torch

    old = streams.old_logprobs(logprobs)
    ratio = log_ratio(logprobs, old).exp()
    advantages = streams["advantages"]
    with torch.no_grad():
        # Log-probs may exceed 0 by a rounding error; nothing larger is meant.
        difference = logprobs.clamp(max=0.0).exp() - streams["engine_logprobs"].clamp(max=0.0).exp()
        dropped = torch.where(advantages > 0, difference > settings.clip_high, difference < -settings.clip_low)
    terms = (-ratio * advantages).where(~dropped, 0)
    return Terms(terms, ratio_metrics(logprobs, old, ratio, dropped))


# The ratio is to the engine itself.
DPPO = Algorithm(
    "dppo",
    advantage,
    loss,
    defaults={"clip_low": 0.2, "clip_high": 0.2, "old_policy": "engine", "correction": "none"},
)
