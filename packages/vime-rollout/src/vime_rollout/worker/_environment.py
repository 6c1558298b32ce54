"""What a user's environment is: it opens a conversation, and answers what the model says."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from vime_rollout.worker._tokenizer import Message


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What a rollout is about.

    Attributes:
        prompt_id: the prompt.
        messages: the prompt as chat messages; None when it is text or token ids.
        text: the prompt as text, when it is text.
        answer: the reference answer; None when there is none.
        record: the data row; empty when there is none.
        rollout: number of the rollout within its group, counted from 0.
        seed: for the environment's own random numbers; the same for the same run, prompt, attempt and rollout.
        evaluation: whether the rollout belongs to an evaluation.
    """

    prompt_id: str
    messages: tuple[Message, ...] | None
    text: str | None
    answer: str | None
    record: Mapping[str, Any]
    rollout: int
    seed: int
    evaluation: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """A model turn.

    Attributes:
        text: decoded from the sampled tokens, without special tokens.
        turn: number of the turn, counted from 0.
        truncated: whether a limit cut it; the rollout ends after this step, whatever the environment answers.
    """

    text: str
    turn: int
    truncated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What the environment answers.

    Attributes:
        messages: messages that the model sees next (roles such as "tool" or "user"), rendered by its chat template.
        text: text that the model sees next instead, appended as it stands; for prompts without a chat template.
        assistant: how the model's turn reads as a message in later renderings, such as with parsed ``tool_calls``; None
            stands for ``{"role": "assistant", "content": response.text}``.
        done: whether the rollout is over.
        reward: reward of the rollout, when the environment gives it; the last one counts. None leaves it to the reward.
        turn_reward: reward of this turn alone (a process reward), recorded on its segments.
        rewards: further rewards to record by name.
        metrics: numbers to log by name.
        reliable: False when the result must not be trusted: no gradient, and no part in the baseline.
        truncated: whether a limit of the environment cut the rollout.
    """

    messages: Sequence[Message] = ()
    text: str | None = None
    assistant: Message | None = None
    done: bool = False
    reward: float | None = None
    turn_reward: float | None = None
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reliable: bool = True
    truncated: bool = False


@runtime_checkable
class Environment(Protocol):
    """One conversation. A factory makes one for each rollout; its methods may be coroutines or plain functions.

    Plain functions run in the worker's event loop, so they must not block: what takes time belongs in a coroutine. An
    environment may also have ``tools`` (descriptions for the chat template, read after reset) and ``close()``.
    """

    def reset(self, task: Task) -> Sequence[Message] | None | Awaitable[Sequence[Message] | None]:
        """Opens the conversation. None takes the prompt as it is."""

    def step(self, response: Response) -> Observation | Awaitable[Observation]:
        """Answers a model turn."""


class SingleTurn:
    """The default: the prompt as it is, one response, and the reward function scores it."""

    def reset(self, task: Task) -> None:
        """Takes the prompt as it is."""

    def step(self, response: Response) -> Observation:
        """Ends the rollout."""
        return Observation(done=True)
