"""MaxRL (arXiv:2602.02710): the deviation from the group's mean reward, over that mean."""

from __future__ import annotations

import numpy as np

from ._groups import centred, group_statistics
from ._objectives import token_clipped_loss
from ._types import Algorithm, RolloutBatch


def advantage(batch: RolloutBatch, settings) -> dict:
    """(reward - group mean) / group mean.

    Raises:
        ValueError: a group whose rewards differ and whose mean is not positive, which has no such quotient.
    """
    statistics = group_statistics(batch)
    bad = np.flatnonzero((statistics.mean <= 0) & ~statistics.constant)
    if len(bad):
        raise ValueError(
            f"maxrl: group {batch.group_ids[bad[0]]!r} has mean reward {statistics.mean[bad[0]]:.4g}; it must be > 0, so "
            "rewards must not be negative"
        )
    mean = np.where(statistics.mean > 0, statistics.mean, 1.0)
    return {"advantages": batch.per_token(centred(batch, scale_by_std=False) / mean[batch.groups])}


# A penalty could make the mean negative.
MAXRL = Algorithm("maxrl", advantage, token_clipped_loss, kl_in_reward=False)
