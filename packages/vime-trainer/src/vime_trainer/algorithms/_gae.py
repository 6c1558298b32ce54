"""Generalised advantage estimation over the trainable tokens of rollouts, and normalisation over a batch."""

from __future__ import annotations

import numpy as np

from ._rewards import along_rollouts
from ._types import RolloutBatch


def gae(
    batch: RolloutBatch,
    rewards: np.ndarray,
    values: np.ndarray,
    gamma: float,
    lam: float,
    end_values: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (arXiv:1506.02438), in float64.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum over l of (gamma lam)^l delta_{t+l}, return_t = A_t + V_t. Token t + 1 is
    the next trainable token of the rollout, in this sample or a later one. After the last, V is 0: the rollout is over, and a
    limit that cut it counts as its end; with `end_values` V is what is given there, such as the critic's value of a rollout
    that a limit cut (arXiv:1712.00378). Masked tokens take no part, whatever stands there.

    Args:
        batch: T tokens of R rollouts.
        rewards, values: [T].
        gamma, lam: discount and lambda, each in [0, 1].
        end_values: [R], V after each rollout's last token; None is 0 for all.

    Returns:
        float64 [T] advantages and float64 [T] returns, 0 where the mask is False.
    """
    places, rollout, step = along_rollouts(batch)
    advantages, returns = np.zeros(len(batch.mask)), np.zeros(len(batch.mask))
    if not len(places):
        return advantages, returns
    # One row a rollout, one column a token, so that the recursion is a loop over columns and not over tokens.
    shape = (len(batch.rewards), int(step.max()) + 1)
    reward, value = np.zeros(shape), np.zeros((shape[0], shape[1] + 1))
    reward[rollout, step] = rewards[places]
    value[rollout, step] = values[places]
    delta = reward + gamma * value[:, 1:] - value[:, :-1]
    if end_values is not None:
        count = np.bincount(rollout, minlength=shape[0])
        begun = np.flatnonzero(count)
        delta[begun, count[begun] - 1] += gamma * np.asarray(end_values, np.float64)[begun]
    running = np.zeros(shape[0])
    # Beyond a rollout's end everything is 0, so the recursion enters its last token with 0.
    for column in range(shape[1] - 1, -1, -1):
        running = delta[:, column] + gamma * lam * running
        delta[:, column] = running
    advantages[places] = delta[rollout, step]
    returns[places] = advantages[places] + values[places]
    return advantages, returns


def normalised(batch: RolloutBatch, advantages: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """float64 [T]: (A - mean) / (sample std + epsilon) over all trainable tokens of the batch; 0 where the mask is False.

    Exactly 0 where all are equal, whatever rounding makes of their standard deviation.
    """
    kept = np.asarray(advantages, np.float64)[batch.mask]
    result = np.zeros(len(batch.mask))
    if len(kept) < 2 or kept.max() == kept.min():
        return result
    result[batch.mask] = (kept - kept.mean()) / (kept.std(ddof=1) + epsilon)
    return result
