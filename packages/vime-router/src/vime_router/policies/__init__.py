"""Which engine gets a request. A policy is a pure class: it sees candidates and answers one of them."""

from vime_router.policies._base import Candidate, Policy
from vime_router.policies._registry import make_policy, policy_names

__all__ = ["Candidate", "Policy", "make_policy", "policy_names"]
