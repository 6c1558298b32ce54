"""RLOO (arXiv:2402.14740): the baseline is the mean of the others."""

from __future__ import annotations

import numpy as np

from ._groups import centred, group_statistics
from ._objectives import token_clipped_loss
from ._types import Algorithm, RolloutBatch


def advantage(batch: RolloutBatch, settings) -> dict:
    """reward - mean of the group's other rewards = n / (n - 1) x (reward - group mean)."""
    count = group_statistics(batch).count.astype(np.float64)
    factor = count / np.maximum(count - 1, 1)
    return {"advantages": batch.per_token(centred(batch, scale_by_std=False) * factor[batch.groups])}


RLOO = Algorithm("rloo", advantage, token_clipped_loss)
