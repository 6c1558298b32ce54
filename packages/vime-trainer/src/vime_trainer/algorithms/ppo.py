"""PPO (arXiv:1707.06347) with a critic and generalised advantage estimation on tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._gae import gae, normalised
from ._objectives import token_clipped_loss
from ._rewards import token_rewards
from ._types import Algorithm, RolloutBatch, Streams, Terms

if TYPE_CHECKING:
    import torch


def advantage(batch: RolloutBatch, settings) -> dict:
    """GAE; the reward lies on a rollout's last trainable token, the KL penalty, if it is part of it, on every one.

    After the last token the value is 0, and with `bootstrap_truncated` the critic's where a limit cut the rollout.
    """
    ends = batch.end_values if settings.bootstrap_truncated else None
    rewards = token_rewards(batch, settings)
    advantages, returns = gae(batch, rewards, batch.values, settings.gamma, settings.gae_lambda, ends)
    if settings.normalise_advantages:
        advantages = normalised(batch, advantages)
    return {"advantages": advantages.astype(np.float32), "returns": returns.astype(np.float32)}


def value_loss(values: torch.Tensor, streams: Streams, settings) -> Terms:
    """max((V - return)^2, (clip(V, V_old +- value_clip) - return)^2) / 2, V_old being the values before the update."""
    old, returns = streams["values"], streams["returns"]
    error = values - returns
    square = error * error
    metrics = {"value": values.detach().clone(), "value_error": error.detach().abs()}
    if settings.value_clip is not None:
        near = values.maximum(old - settings.value_clip).minimum(old + settings.value_clip) - returns
        metrics["value_clip_fraction"] = (near * near > square).float().detach()
        square = square.maximum(near * near)
    return Terms(0.5 * square, metrics)


PPO = Algorithm(
    "ppo",
    advantage,
    token_clipped_loss,
    needs_group=False,
    needs_critic=True,
    token_rewards=True,
    value_loss=value_loss,
    defaults={"normalise_advantages": True, "clip_high": 0.2},
)
