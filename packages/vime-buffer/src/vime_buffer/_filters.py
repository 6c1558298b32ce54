"""Built-in group filters."""

from __future__ import annotations

from vime_buffer._intake import FAILED_STATUSES
from vime_buffer.hooks import KEEP, FilterDecision, drop
from vime_proto.sample.v1 import sample_pb2


def keep_all(group: sample_pb2.Group) -> FilterDecision:
    """Keeps every group."""
    return KEEP


def nonzero_std(group: sample_pb2.Group) -> FilterDecision:
    """Drops groups whose rewards are all equal: their advantages are zero (dynamic sampling of DAPO, arXiv:2503.14476).

    Compares the largest with the smallest reward rather than a computed deviation, which rounding makes non-zero. Failed and
    unreliable rollouts, and those without a reward, have no part in it.
    """
    rewards = [
        rollout.reward
        for rollout in group.rollouts
        if rollout.HasField("reward")
        and rollout.status not in FAILED_STATUSES
        and (rollout.reliable or not rollout.HasField("reliable"))
    ]
    if not rewards:
        return drop("no_rewards")
    return KEEP if max(rewards) != min(rewards) else drop("zero_std")


GROUP_FILTERS = {"none": keep_all, "nonzero_std": nonzero_std}
