"""Statistics of groups of rollouts, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._types import RolloutBatch


@dataclass(frozen=True)
class GroupStatistics:
    """Of the usable rollouts of each of G groups.

    Attributes:
        count: int64 [G].
        mean: float64 [G]; 0 for a group without any.
        std: float64 [G], sample standard deviation (n - 1); 0 below two.
        constant: bool [G], the largest reward equals the smallest. Compared exactly: eight rewards of 0.1 are constant,
            whatever rounding makes of their standard deviation.
    """

    count: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    constant: np.ndarray


def group_statistics(batch: RolloutBatch) -> GroupStatistics:
    """Computes them without a loop over groups."""
    groups, size = batch.groups[batch.usable], len(batch.group_ids)
    rewards = batch.rewards[batch.usable].astype(np.float64)
    count = np.bincount(groups, minlength=size)
    mean = np.bincount(groups, weights=rewards, minlength=size) / np.maximum(count, 1)
    deviation = rewards - mean[groups]
    square = np.bincount(groups, weights=deviation * deviation, minlength=size)
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, groups, rewards)
    np.maximum.at(high, groups, rewards)
    return GroupStatistics(count, mean, np.sqrt(square / np.maximum(count - 1, 1)), low >= high)


def centred(batch: RolloutBatch, scale_by_std: bool, epsilon: float = 1e-6) -> np.ndarray:
    """float64 [R]: reward minus its group's mean, over (sample std + epsilon) if asked.

    Exactly 0 in a group whose rewards are all equal, in a group with fewer than two usable rollouts (it has no baseline),
    and for rollouts that are not usable.

    Raises:
        ValueError: groups of one rollout.
    """
    refuse_single(batch.group_size)
    statistics = group_statistics(batch)
    rewards = np.where(batch.usable, batch.rewards, 0.0)
    values = rewards - statistics.mean[batch.groups]
    if scale_by_std:
        values = values / (statistics.std[batch.groups] + epsilon)
    live = batch.usable & (statistics.count[batch.groups] > 1) & ~statistics.constant[batch.groups]
    return np.where(live, values, 0.0)


def refuse_single(group_size: int) -> None:
    """Raises ValueError for groups of one rollout."""
    if group_size < 2:
        raise ValueError(f"group_size: {group_size} rollout has no group to compare with; use at least 2")
