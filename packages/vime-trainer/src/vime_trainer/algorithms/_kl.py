"""Estimators of KL(policy || reference) per token (Schulman 2020), samples drawn from the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime_proto.errors import nearest

if TYPE_CHECKING:
    import torch

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")
_LIMIT = 20.0


def beyond_limit(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float32 [T], detached: 1 where d of `kl_terms` was clamped, so that the estimate has no gradient."""
    return ((reference - logprobs).detach().abs() > _LIMIT).float()


def kl_terms(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """[T], with d = log pi_ref - log pi clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1.

    k1 and k3 are unbiased in value, but differentiated they give another gradient than the KL's: that of k1 is zero in
    expectation. k2 is biased in value and its gradient is the KL's. "k1+" and "k3+" have the value of k1 and k3 and the
    gradient of k2.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(nearest(estimator, ESTIMATORS, "KL estimator"))
    d = (reference - logprobs).clamp(-_LIMIT, _LIMIT)
    if estimator == "k2":
        return 0.5 * d * d
    value = -d if estimator in ("k1", "k1+") else d.exp() - d - 1.0
    if not estimator.endswith("+"):
        return value
    right = 0.5 * d * d
    return value.detach() + right - right.detach()
