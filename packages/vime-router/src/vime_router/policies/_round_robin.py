"""Each engine in turn."""

from __future__ import annotations

from collections.abc import Sequence

from vime_router.policies._base import Candidate


class RoundRobin:
    """Takes the next engine in order of id after the one taken last, so that joining and leaving engines skip nobody."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], estimated_tokens: int) -> Candidate:
        """The first candidate above the last one chosen, else the first of all."""
        chosen = next((one for one in candidates if one.engine_id > self._last), candidates[0])
        self._last = chosen.engine_id
        return chosen
