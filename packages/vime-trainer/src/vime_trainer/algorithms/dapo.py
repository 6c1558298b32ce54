"""DAPO (arXiv:2503.14476): token mean, asymmetric clipping, soft punishment of overlong responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ._groups import centred
from ._objectives import token_clipped_loss
from ._types import Algorithm, RolloutBatch


def overlong_penalty(tokens: np.ndarray, limit: int, margin: int) -> np.ndarray:
    """float64, added to the reward: 0 up to limit - margin tokens, falling linearly to -1 at `limit`, -1 beyond."""
    over = ((limit - margin) - np.asarray(tokens, np.float64)) / margin
    return np.clip(over, -1.0, 0.0)


def advantage(batch: RolloutBatch, settings) -> dict:
    """GRPO's, after the penalty where `overlong_limit` is set."""
    if settings.overlong_limit is not None:
        penalty = overlong_penalty(batch.response_tokens, settings.overlong_limit, settings.overlong_margin)
        batch = replace(batch, rewards=batch.rewards + penalty)
    return {"advantages": batch.per_token(centred(batch, scale_by_std=True))}


DAPO = Algorithm("dapo", advantage, token_clipped_loss)
