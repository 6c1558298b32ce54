"""On-policy distillation: per token, the reverse KL to a teacher is what is made small."""

from __future__ import annotations

import numpy as np

from ._objectives import LOG_RATIO_LIMIT, token_clipped_loss
from ._types import Algorithm, RolloutBatch


def advantage(batch: RolloutBatch, settings) -> dict:
    """log pi_teacher - log pi_old of each trainable token, clamped to +-20: minus the k1 estimate of KL(policy || teacher).

    Rewards are not looked at.
    """
    gap = batch.logprobs["teacher"].astype(np.float64) - batch.policy_logprobs()
    gap = np.clip(np.where(batch.mask, gap, 0.0), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {"advantages": gap.astype(np.float32)}


DISTILLATION = Algorithm(
    "distillation", advantage, token_clipped_loss, needs_group=False, needs_teacher=True, kl_in_reward=False
)
