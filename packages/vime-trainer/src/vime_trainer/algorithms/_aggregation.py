"""From per-token terms to one number: weights that are fixed for the whole batch, however it is cut."""

from __future__ import annotations

import numpy as np

from vime_proto.errors import nearest

from ._types import RolloutBatch

AGGREGATIONS = ("token", "sequence", "constant")


def token_weights(
    batch: RolloutBatch, aggregation: str, constant_length: int | None = None, rollouts: np.ndarray | None = None
) -> np.ndarray:
    """float32 [T]: the loss is the sum of weight x term. 0 at tokens that do not count.

    "token": mean over all trainable tokens. "sequence": mean over a rollout's trainable tokens, all its samples, then over
    rollouts. "constant": sum over tokens / `constant_length`, then mean over rollouts (Dr. GRPO, arXiv:2503.20783). The
    denominators count usable rollouts with at least one trainable token, so a rollout counts once however many samples it
    has.

    Args:
        rollouts: bool [R]; only these take part (an optimizer step on a part of the batch). None takes all.

    Raises:
        ValueError: unknown aggregation, or "constant" without a length.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(nearest(aggregation, AGGREGATIONS, "aggregation"))
    token_rollouts = batch.token_rollouts
    mask = batch.mask if rollouts is None else batch.mask & rollouts[token_rollouts]
    tokens = np.bincount(token_rollouts[mask], minlength=len(batch.rewards)).astype(np.float64)
    count = np.count_nonzero(tokens)
    if count == 0:
        return np.zeros(len(mask), np.float32)
    if aggregation == "token":
        per_rollout = np.full(len(tokens), 1.0 / tokens.sum())
    elif aggregation == "sequence":
        per_rollout = 1.0 / (np.maximum(tokens, 1.0) * count)
    elif constant_length is None:
        raise ValueError('algorithm.constant_length: needed by aggregation "constant"')
    else:
        per_rollout = np.full(len(tokens), 1.0 / (count * constant_length))
    return np.where(mask, per_rollout[token_rollouts], 0.0).astype(np.float32)
