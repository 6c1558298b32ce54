"""A custom environment and a custom reward for ``vime-rollout worker``, written against the public names alone.

The environment plays "guess the number": the prompt's answer is the number, and the model is told whether it is higher or lower.
The reward asks for a short answer. Put this file where Python finds it and configure the worker:

    environment = "guessing_game:GuessingGame"
    environment_options = { most_guesses = 4 }

or, for the reward with single turns:

    reward = "brief"
    [rewards.brief]
    function = "guessing_game:brief"
    most_characters = 10
"""

from __future__ import annotations

import re

from vime_rollout.rewards import RewardInput, Score
from vime_rollout.worker import Environment, Message, Observation, Response, Task


class GuessingGame(Environment):
    """Rewards 1.0 for the right number, less for each wrong guess before it, 0.0 when it is never guessed.

    Args:
        most_guesses: turns after which the game is over.
    """

    def __init__(self, most_guesses: int = 4):
        self._most_guesses = most_guesses
        self._number = 0

    def reset(self, task: Task) -> list[Message]:
        """Opens with the rules, whatever the prompt says."""
        self._number = int(task.answer or 0)
        return [{"role": "user", "content": f"Guess my number. You have {self._most_guesses} guesses."}]

    def step(self, response: Response) -> Observation:
        """Answers a guess."""
        found = re.findall(r"-?\d+", response.text)
        guess = int(found[-1]) if found else None
        left = self._most_guesses - response.turn - 1
        if guess == self._number:
            return Observation(
                done=True, reward=(left + 1) / self._most_guesses, metrics={"guesses": response.turn + 1}
            )
        if left == 0:
            return Observation(done=True, reward=0.0, metrics={"guesses": self._most_guesses})
        hint = "That is no number." if guess is None else "Higher." if guess < self._number else "Lower."
        return Observation(messages=[{"role": "user", "content": hint}])


def brief(item: RewardInput, *, most_characters: int = 20) -> Score:
    """1.0 when the response holds the answer and is short; half of it when it is long."""
    right = item.answer is not None and item.answer in item.response
    short = len(item.response) <= most_characters
    return Score(right * (1.0 if short else 0.5), {"characters": len(item.response)})
