"""One rollout: model turns and the environment's answers, until it is done."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker._client import Generator, TurnRequest
from vime_rollout.worker._conversation import Conversation
from vime_rollout.worker._environment import Environment, Observation, Response
from vime_rollout.worker._errors import RolloutError
from vime_rollout.worker._fanout import train_once
from vime_rollout.worker._prompt import Prepared
from vime_rollout.worker._teacher import Teacher
from vime_rollout.worker._tokenizer import Tokenizer
from vime_rollout.worker._trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Outcome:
    """What became of a rollout before it is scored; readable while it runs.

    Attributes:
        trajectories: its samples so far, the last one in the making.
        status: a RolloutStatus; ABORTED while it runs.
        turns: text of each model turn; filled by multi-turn rollouts alone.
        reward: from the environment; None leaves it to the reward function.
        rewards, metrics: further numbers by name.
        reliable: False when the environment says so.
        error: why it failed; None when it did not.
        seconds: from its first request to its end.
    """

    index: int
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    status: int = pb.ROLLOUT_STATUS_ABORTED
    turns: list[str] = dataclasses.field(default_factory=list)
    reward: float | None = None
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    reliable: bool = True
    error: RolloutError | None = None
    seconds: float = 0.0

    def response_ids(self) -> np.ndarray:
        """Sampled ids of a single-turn rollout: int32 [n]."""
        parts = [one.token_ids.data for one in self.trajectories[-1].segments if one.role == pb.SEGMENT_ROLE_MODEL]
        return np.frombuffer(b"".join(parts), dtype="<i4")

    def samples(self, rollout_id: str) -> list[pb.Sample]:
        """Its samples; tokens that several share are trainable in the first alone."""
        samples = [one.sample(f"{rollout_id}:{number}") for number, one in enumerate(self.trajectories)]
        if len(samples) > 1:
            train_once(samples)
        return samples


class RolloutRunner:
    """Runs rollouts.

    Args:
        generator: where tokens come from.
        tokenizer: of the model.
        environment: makes the environment of a rollout; None is single turn, without its cost.
        max_turns: most model turns.
        routing: whether expert routes are wanted.
        teacher: scores what was sampled, except in evaluations; None for no teacher.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        environment: Callable[[], Environment] | None = None,
        max_turns: int = 16,
        routing: bool = False,
        teacher: Teacher | None = None,
    ):
        self._teacher = teacher
        self._generator = generator
        self._tokenizer = tokenizer
        self._factory = environment
        self._max_turns = max_turns
        self._routing = routing

    async def run(self, prepared: Prepared, outcome: Outcome) -> None:
        """Runs one rollout into ``outcome``; a failure is recorded there, a cancellation is passed on."""
        started = time.monotonic()
        try:
            if self._factory is None:
                await self._single(prepared, outcome)
            else:
                await self._multi(prepared, outcome)
            if self._teacher is not None and not prepared.evaluation:
                await self._teacher.score(outcome.trajectories, prepared.rollout_id(outcome.index))
        except RolloutError as error:
            outcome.error, outcome.status = error, pb.ROLLOUT_STATUS_FAILED
        except Exception as error:
            # Whatever goes wrong in one rollout is its own failure; the others of the group go on.
            log.exception("rollout %s failed", prepared.rollout_id(outcome.index))
            outcome.error = RolloutError("worker", f"{type(error).__name__}: {error}", True)
            outcome.status = pb.ROLLOUT_STATUS_FAILED
        finally:
            outcome.seconds = time.monotonic() - started

    async def _single(self, prepared: Prepared, outcome: Outcome) -> None:
        if not outcome.trajectories:
            outcome.trajectories.append(Trajectory(prepared.ids))
        finish = await self._turn(prepared, outcome, 0)
        outcome.status = _status(finish)

    async def _turn(self, prepared: Prepared, outcome: Outcome, turn: int) -> int:
        lease, index = prepared.lease, outcome.index
        trajectory = outcome.trajectories[-1]
        request = TurnRequest(
            key=f"{prepared.rollout_id(index)}:{turn}",
            sampling=prepared.sampling,
            seed=lambda part: prepared.sent_seed(index, turn, part),
            session_id=prepared.rollout_id(index),
            minimum_version=lease.minimum_version if lease.HasField("minimum_version") else None,
            routing=self._routing,
            # An earlier attempt of a single turn may have left a part of it.
            generated=trajectory.model_tokens if self._factory is None else 0,
        )
        return await self._generator.turn(trajectory, request)

    async def _multi(self, prepared: Prepared, outcome: Outcome) -> None:
        environment = await _call("environment", self._factory)
        try:
            await self._converse(prepared, outcome, environment)
        finally:
            close = getattr(environment, "close", None)
            if close is not None:
                await _call("environment", close)

    async def _converse(self, prepared: Prepared, outcome: Outcome, environment: Environment) -> None:
        opening = await _call("environment", environment.reset, prepared.task(outcome.index))
        tools = getattr(environment, "tools", None)
        messages = prepared.messages if opening is None else opening
        conversation = None
        if messages is not None and (opening is not None or self._tokenizer.has_chat_template):
            conversation = await _call("environment", lambda: Conversation(self._tokenizer, messages, tools))
        outcome.trajectories.append(Trajectory(prepared.ids if conversation is None else conversation.prompt_ids()))
        for turn in range(self._max_turns):
            trajectory = outcome.trajectories[-1]
            first_segment, start = len(trajectory.segments), trajectory.tokens
            finish = await self._turn(prepared, outcome, turn)
            sampled = trajectory.token_ids[start:]
            (text,) = self._tokenizer.decode([sampled])
            outcome.turns.append(text)
            truncated = finish == pb.FINISH_REASON_LENGTH
            observation = await _call("environment", environment.step, Response(text, turn, truncated))
            _record(observation, outcome, trajectory, first_segment)
            last = turn + 1 == self._max_turns
            if observation.done or truncated or observation.truncated or last:
                cut = truncated or observation.truncated or (last and not observation.done)
                outcome.status = pb.ROLLOUT_STATUS_TRUNCATED if cut else pb.ROLLOUT_STATUS_COMPLETED
                return
            self._answer(outcome, conversation, sampled, text, observation)

    def _answer(
        self, outcome: Outcome, conversation: Conversation | None, sampled, text: str, observation: Observation
    ) -> None:
        trajectory = outcome.trajectories[-1]
        if observation.text is not None:
            trajectory.add_given(pb.SEGMENT_ROLE_TOOL, self._tokenizer.encode(observation.text).astype("<i4").tobytes())
            return
        if not observation.messages:
            raise RolloutError("environment", "step answered neither messages, nor text, nor done", False)
        if conversation is None:
            raise RolloutError("environment", "step answered messages, but the prompt is no chat: answer text", False)
        assistant = observation.assistant or {"role": "assistant", "content": text}
        step = conversation.advance(sampled, assistant, observation.messages)
        if step.given is None:
            outcome.trajectories.append(Trajectory(step.prompt_ids))
            return
        for role, ids in step.given:
            trajectory.add_given(role, ids)


def _status(finish: int) -> int:
    return pb.ROLLOUT_STATUS_TRUNCATED if finish == pb.FINISH_REASON_LENGTH else pb.ROLLOUT_STATUS_COMPLETED


def _record(observation: Any, outcome: Outcome, trajectory: Trajectory, first_segment: int) -> None:
    if not isinstance(observation, Observation):
        raise RolloutError("environment", f"step answered {type(observation).__name__}, not an Observation", False)
    if observation.reward is not None:
        outcome.reward = float(observation.reward)
    outcome.rewards.update(observation.rewards)
    outcome.metrics.update(observation.metrics)
    outcome.reliable = outcome.reliable and observation.reliable
    if observation.turn_reward is not None:
        for segment in trajectory.segments[first_segment:]:
            if segment.role == pb.SEGMENT_ROLE_MODEL:
                segment.reward = observation.turn_reward


async def _call(stage: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result
    except RolloutError:
        raise
    except Exception as error:
        raise RolloutError(stage, f"{type(error).__name__}: {error}", True) from error
