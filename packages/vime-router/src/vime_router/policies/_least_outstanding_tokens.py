"""The engine with the least work before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vime_router.policies._base import Candidate


class LeastOutstandingTokens:
    """Takes the engine with the fewest outstanding tokens, then requests; ties are drawn at random.

    Args:
        rng: source of randomness.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate], estimated_tokens: int) -> Candidate:
        """A candidate of least load."""
        load = [(one.outstanding_tokens, one.outstanding_requests) for one in candidates]
        least = min(load)
        return self._rng.choice([one for one, its_load in zip(candidates, load, strict=True) if its_load == least])
