"""REINFORCE++ (arXiv:2501.03262): advantages normalised over all tokens of the global batch, without a critic."""

from __future__ import annotations

import numpy as np

from ._gae import normalised
from ._groups import centred
from ._objectives import token_clipped_loss
from ._rewards import along_rollouts, kl_penalty
from ._types import Algorithm, RolloutBatch


def advantage(batch: RolloutBatch, settings) -> dict:
    """reward - the KL penalty of this and all later tokens of the rollout, normalised over the batch."""
    places, rollout, _ = along_rollouts(batch)
    penalty = kl_penalty(batch, settings)[places]
    total = np.bincount(rollout, weights=penalty, minlength=len(batch.rewards))
    before = np.cumsum(penalty) - penalty
    # Cumulative sums run over all rollouts; each rollout's part begins where the sum of the earlier ones ends.
    start = np.cumsum(total) - total
    raw = np.zeros(len(batch.mask))
    raw[places] = batch.rewards[rollout] - (total[rollout] - (before - start[rollout]))
    return {"advantages": normalised(batch, raw).astype(np.float32)}


def baseline_advantage(batch: RolloutBatch, settings) -> dict:
    """reward - group mean, normalised over the batch."""
    return {"advantages": normalised(batch, batch.per_token(centred(batch, scale_by_std=False))).astype(np.float32)}


REINFORCE_PLUS_PLUS = Algorithm(
    "reinforce_plus_plus",
    advantage,
    token_clipped_loss,
    needs_group=False,
    token_rewards=True,
    defaults={"kl": {"place": "reward", "estimator": "k1"}},
)
REINFORCE_PLUS_PLUS_BASELINE = Algorithm(
    "reinforce_plus_plus_baseline", baseline_advantage, token_clipped_loss, defaults={"kl": {"estimator": "k2"}}
)
