"""Policies by name."""

from __future__ import annotations

import random
from collections.abc import Callable

from vime_proto.errors import ContractError, nearest
from vime_router.policies._base import Policy
from vime_router.policies._least_outstanding_tokens import LeastOutstandingTokens
from vime_router.policies._round_robin import RoundRobin

_POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "least_outstanding_tokens": LeastOutstandingTokens,
    "round_robin": lambda rng: RoundRobin(),
}


def policy_names() -> list[str]:
    """Names that ``make_policy`` takes."""
    return sorted(_POLICIES)


def make_policy(name: str, rng: random.Random) -> Policy:
    """A new policy.

    Raises:
        ContractError: unknown name; the text holds the nearest one and all valid ones.
    """
    if name not in _POLICIES:
        raise ContractError("policy", nearest(name, _POLICIES, "policy"))
    return _POLICIES[name](rng)
