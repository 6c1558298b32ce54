"""What a reward is given and what it answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class RewardInput:
    """A response to score.

    Attributes:
        response: text of the last model turn, decoded from the sampled tokens, without special tokens.
        answer: the reference answer of the prompt; None when it has none.
        turns: text of every model turn, in order; the last equals ``response``.
        prompt_text: the prompt as rendered for the model, special tokens included.
        truncated: whether a limit cut the response.
        prompt_id: the prompt, for messages.
        record_json: the data row as read, a JSON object; empty when there is none.
    """

    response: str
    answer: str | None = None
    turns: tuple[str, ...] = ()
    prompt_text: str = ""
    truncated: bool = False
    prompt_id: str = ""
    record_json: str = ""

    @property
    def record(self) -> Mapping[str, Any]:
        """The data row as a mapping; empty when there is none."""
        return json.loads(self.record_json) if self.record_json else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A reward.

    Attributes:
        value: the number that is trained on; finite. 0.0 is a value like any other.
        parts: further numbers to record with it, by name.
    """

    value: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


RewardFunction = Callable[..., "Score | float"]
"""``function(item: RewardInput, **options) -> float | Score``. It runs in a process of its own, and may raise."""


class RewardError(Exception):
    """A reward could not be computed; the text says why. The rollout fails, and gets no number."""


class RewardTimeout(RewardError):
    """A reward ran longer than its limit; its process was ended."""


def check_score(result: Any, name: str) -> Score:
    """The result of a reward function as a ``Score``.

    Raises:
        RewardError: no number, or one that is not finite.
    """
    score = result if isinstance(result, Score) else Score(result)
    numbers = {name: score.value, **score.parts}
    for key, value in numbers.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(f"reward {name!r} answered {value!r} for {key!r}, which is no number") from None
        if number - number != 0.0:
            raise RewardError(f"reward {name!r} answered {number!r} for {key!r}, which is not finite")
        numbers[key] = number
    value = numbers.pop(name) if name not in score.parts else float(score.value)
    return Score(value, {key: number for key, number in numbers.items() if key in score.parts})
