"""Rewards on tokens, and the KL penalty that is part of a reward."""

from __future__ import annotations

import numpy as np

from ._kl import kl_terms
from ._types import RolloutBatch


def kl_in_reward(settings) -> bool:
    """Whether the configuration makes the KL to the reference part of the reward."""
    return settings is not None and settings.kl.coefficient > 0 and settings.kl.place == "reward"


def kl_penalty(batch: RolloutBatch, settings) -> np.ndarray:
    """float64 [T]: coefficient x KL estimate at trainable tokens, 0 elsewhere and where the KL is no part of the reward."""
    if not kl_in_reward(settings):
        return np.zeros(len(batch.mask))
    import torch

    policy, reference = (
        torch.from_numpy(np.where(batch.mask, values, 0.0).astype(np.float64))
        for values in (batch.policy_logprobs(), batch.logprobs["reference"])
    )
    return settings.kl.coefficient * kl_terms(policy, reference, settings.kl.estimator).numpy()


def rollout_penalty(batch: RolloutBatch, settings) -> np.ndarray:
    """float64 [R]: `kl_penalty`, summed over each rollout's trainable tokens."""
    return np.bincount(batch.token_rollouts, weights=kl_penalty(batch, settings), minlength=len(batch.rewards))


def token_rewards(batch: RolloutBatch, settings) -> np.ndarray:
    """float64 [T]: minus the KL penalty on every trainable token, and the rollout's reward on its last one."""
    rewards = -kl_penalty(batch, settings)
    last = batch.last_tokens
    found = last >= 0
    rewards[last[found]] += batch.rewards[found]
    return rewards


def along_rollouts(batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trainable tokens rollout by rollout: places [N] in the batch, rollout [N], and place within the rollout [N].

    A rollout's samples follow one another in the batch's order; masked tokens between are left out.
    """
    places = np.flatnonzero(batch.mask)
    owners = batch.token_rollouts[places]
    order = np.argsort(owners, kind="stable")
    places, owners = places[order], owners[order]
    counts = np.bincount(owners, minlength=len(batch.rewards))
    return places, owners, np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
