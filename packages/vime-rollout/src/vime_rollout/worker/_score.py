"""Rewards of a group's rollouts: decoded together, cheap ones at once, others in the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.rewards import (
    RewardError,
    RewardInput,
    RewardPool,
    RewardSpec,
    Score,
    find_spec,
)
from vime_rollout.rewards._registry import apply, resolve
from vime_rollout.worker._prompt import Prepared
from vime_rollout.worker._rollout import Outcome
from vime_rollout.worker._tokenizer import Tokenizer


class Scorer:
    """Turns outcomes into scored rollouts.

    Args:
        specs: the configured rewards by name.
        default: name of the reward of prompts that name none.
        pool: where rewards run that are not cheap.
        tokenizer: decodes responses.

    Raises:
        ContractError: an unknown default.
    """

    def __init__(self, specs: Mapping[str, RewardSpec], default: str, pool: RewardPool, tokenizer: Tokenizer):
        self._specs, self._default = specs, default
        find_spec(specs, default)
        self._inline = {name: resolve(spec) for name, spec in specs.items() if spec.inline}
        self._pool = pool
        self._tokenizer = tokenizer

    async def rollouts(self, prepared: Prepared, outcomes: Sequence[Outcome]) -> list[pb.Rollout]:
        """The rollouts of a group, scored. A reward that fails makes a failed rollout with its reason, never a number."""
        self._decode(outcomes)
        results = await asyncio.gather(*(self._score(prepared, outcome) for outcome in outcomes))
        return [
            build_rollout(prepared, outcome, score, seconds, prepared.lease.prompt.reward or self._default)
            for outcome, (score, seconds) in zip(outcomes, results, strict=True)
        ]

    def _decode(self, outcomes: Sequence[Outcome]) -> None:
        waiting = [one for one in outcomes if one.error is None and not one.turns]
        if waiting:
            for outcome, text in zip(
                waiting, self._tokenizer.decode([one.response_ids() for one in waiting]), strict=True
            ):
                outcome.turns.append(text)

    async def _score(self, prepared: Prepared, outcome: Outcome) -> tuple[Score | RewardError | None, float]:
        if outcome.error is not None or outcome.reward is not None:
            return None, 0.0
        prompt = prepared.lease.prompt
        started = time.monotonic()
        item = RewardInput(
            response=outcome.turns[-1],
            answer=prompt.answer if prompt.HasField("answer") else None,
            turns=tuple(outcome.turns),
            prompt_text=prepared.text,
            truncated=outcome.status == pb.ROLLOUT_STATUS_TRUNCATED,
            prompt_id=prompt.prompt_id,
            record_json=prompt.record_json,
        )
        try:
            spec = find_spec(self._specs, prompt.reward or self._default)
            if spec.inline:
                score = apply(self._inline[spec.name], spec, item)
            else:
                score = await self._pool.score(spec, item)
        except (RewardError, ContractError) as error:
            return RewardError(str(error)), time.monotonic() - started
        except Exception as error:
            return RewardError(f"{type(error).__name__}: {error}"), time.monotonic() - started
        return score, time.monotonic() - started


def build_rollout(
    prepared: Prepared,
    outcome: Outcome,
    score: Score | RewardError | None = None,
    seconds: float = 0.0,
    name: str = "reward",
) -> pb.Rollout:
    """A rollout as a message; ``name`` is that of its reward."""
    rollout_id = prepared.rollout_id(outcome.index)
    rollout = pb.Rollout(
        rollout_id=rollout_id,
        attempt=prepared.lease.attempt,
        status=outcome.status,
        rewards=outcome.rewards,
        metrics=outcome.metrics,
        generate_seconds=outcome.seconds,
    )
    if not outcome.reliable:
        rollout.reliable = False
    failure = outcome.error.failure() if outcome.error is not None else None
    if isinstance(score, RewardError):
        failure = pb.Failure(stage="reward", message=str(score), retryable=True)
    if failure is not None:
        rollout.status = pb.ROLLOUT_STATUS_FAILED
        rollout.failure.CopyFrom(failure)
        return rollout
    if isinstance(score, Score):
        rollout.rewards.update({name: score.value, **score.parts})
        rollout.reward = score.value
        rollout.reward_seconds = seconds
    elif outcome.reward is not None:
        rollout.rewards["environment"] = outcome.reward
        rollout.reward = outcome.reward
    rollout.samples.extend(outcome.samples(rollout_id))
    return rollout
