"""Environments of a user."""

from __future__ import annotations

from vime_rollout.worker import Observation, Response, Task


class Echo:
    """Answers every turn by a tool message, ``turns`` times; its reward is the number of turns."""

    made: list[Echo] = []

    def __init__(self, turns: int = 2, reliable: bool = True):
        self.turns, self.reliable = turns, reliable
        self.closed = False
        self.responses: list[Response] = []
        Echo.made.append(self)

    async def reset(self, task: Task):
        self.task = task
        return None

    async def step(self, response: Response) -> Observation:
        self.responses.append(response)
        if response.turn + 1 == self.turns:
            return Observation(
                done=True, reward=float(self.turns), reliable=self.reliable, metrics={"turns": self.turns}
            )
        messages = [{"role": "tool", "content": response.text}, {"role": "tool", "content": "tool"}]
        return Observation(messages=messages, turn_reward=0.25, rewards={"format": 1.0})

    async def close(self) -> None:
        self.closed = True


class Searching:
    """Appends text as it stands; leaves the reward to the reward function."""

    def reset(self, task):
        return None

    def step(self, response):
        if response.text.endswith("</search>"):
            return Observation(text="<result>4</result>")
        return Observation(done=True)


class Failing:
    def __init__(self, where: str):
        self.where = where

    def reset(self, task):
        if self.where == "reset":
            raise ConnectionError("no sandbox")

    def step(self, response):
        if self.where == "step":
            raise ConnectionError("no sandbox")
        return Observation()


class Endless:
    def reset(self, task):
        return [{"role": "user", "content": "go"}]

    def step(self, response):
        return Observation(messages=[{"role": "user", "content": "on"}])
