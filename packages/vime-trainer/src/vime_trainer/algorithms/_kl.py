"""Estimators of KL(policy || reference) per token (Schulman 2020), samples drawn from the policy."""

from __future__ import annotations

import torch

from vime_proto.errors import nearest

ESTIMATORS = ("k1", "k2", "k3")
_LIMIT = 20.0


def kl_terms(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """[T], with d = log pi_ref - log pi clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1.

    k1 and k3 are unbiased in value; k2 is biased in value but its gradient is that of the KL.

    Raises:
        ValueError: unknown estimator.
    """
    d = (reference - logprobs).clamp(-_LIMIT, _LIMIT)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return d.exp() - d - 1.0
    raise ValueError(nearest(estimator, ESTIMATORS, "KL estimator"))
