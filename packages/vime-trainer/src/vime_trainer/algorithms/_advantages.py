"""Calls an algorithm's `advantage`: what it needs must be there, and what it gives must fit the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ._rewards import kl_in_reward, rollout_penalty
from ._types import Algorithm, RolloutBatch


def required_columns(algorithm: Algorithm, settings, optimizer_steps: int = 1) -> frozenset[str]:
    """Which of "old", "reference", "teacher" (log-probs), "values" and "end_values" must be there before `advantage` is called.

    "old" is needed where a later step, the reward or the whole batch's correction looks at it; with one optimizer step the
    forward pass of the loss itself gives the old policy otherwise.
    """
    needed = set()
    early = optimizer_steps > 1 or kl_in_reward(settings) or algorithm.needs_teacher or settings.correction_normalise
    if settings.old_policy == "trainer" and early:
        needed.add("old")
    if settings.kl.coefficient > 0:
        needed.add("reference")
    if algorithm.needs_teacher:
        needed.add("teacher")
    if algorithm.needs_critic:
        needed |= {"values", "end_values"} if settings.bootstrap_truncated else {"values"}
    return frozenset(needed)


def advantage_streams(algorithm: Algorithm, batch: RolloutBatch, settings) -> dict[str, np.ndarray]:
    """float32 [T] streams by name, 0 where the mask is False.

    The KL penalty, where it is part of the reward, is taken off `batch.rewards` unless the algorithm places rewards on
    tokens itself.

    Raises:
        ValueError: log-probs or values that the algorithm needs are missing; a stream of another length, one that is not
            finite at a trainable token, or none called "advantages" (with a critic, "returns").
    """
    have = {*batch.logprobs, *(name for name in ("values", "end_values") if getattr(batch, name) is not None)}
    missing = sorted(required_columns(algorithm, settings) - have)
    if missing:
        raise ValueError(
            f"algorithm {algorithm.name}: needs {', '.join(missing)} of the batch, which has {sorted(have)}"
        )
    if kl_in_reward(settings) and not algorithm.token_rewards:
        batch = replace(batch, rewards=batch.rewards - rollout_penalty(batch, settings))
    streams = algorithm.advantage(batch, settings)
    return {name: _checked(algorithm, batch, name, streams) for name in {**streams, **_wanted(algorithm)}}


def _wanted(algorithm: Algorithm) -> dict[str, None]:
    return dict.fromkeys(("advantages", "returns") if algorithm.needs_critic else ("advantages",))


def _checked(algorithm: Algorithm, batch: RolloutBatch, name: str, streams: Mapping[str, np.ndarray]) -> np.ndarray:
    about = f"algorithm {algorithm.name}: advantage() gave"
    if name not in streams:
        raise ValueError(f"{about} no stream {name!r}, only {sorted(streams)}")
    values = np.asarray(streams[name])
    if values.shape != batch.mask.shape:
        raise ValueError(f"{about} {name!r} of shape {list(values.shape)} for {len(batch.mask)} tokens")
    if not np.isfinite(values[batch.mask]).all():
        at = int(np.flatnonzero(batch.mask & ~np.isfinite(values))[0])
        group = batch.group_ids[batch.groups[batch.token_rollouts[at]]]
        raise ValueError(f"{about} {values[at]} in {name!r} at a token of group {group!r}")
    return np.where(batch.mask, values, 0.0).astype(np.float32)
