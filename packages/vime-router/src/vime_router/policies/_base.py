"""What a policy sees and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """An engine that may take the request.

    Attributes:
        engine_id: unique within the fleet.
        outstanding_requests: requests that the router has on it now.
        outstanding_tokens: estimated tokens, prompt and response, of those requests.
    """

    engine_id: str
    outstanding_requests: int = 0
    outstanding_tokens: int = 0


class Policy(Protocol):
    """Chooses an engine. Holds its own memory only; does no I/O."""

    def choose(self, candidates: Sequence[Candidate], estimated_tokens: int) -> Candidate:
        """Answers one of ``candidates``, which is never empty and is sorted by engine id."""
        ...
