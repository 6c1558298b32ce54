"""Rewards: built-in ones by name, a user's by import path, run in processes with a real time limit."""

from vime_rollout.rewards._builtin import exact, numeric
from vime_rollout.rewards._math import math
from vime_rollout.rewards._pool import RewardPool
from vime_rollout.rewards._registry import RewardSpec, find_spec, read_specs
from vime_rollout.rewards._types import (
    RewardError,
    RewardFunction,
    RewardInput,
    RewardTimeout,
    Score,
)

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardInput",
    "RewardPool",
    "RewardSpec",
    "RewardTimeout",
    "Score",
    "exact",
    "find_spec",
    "math",
    "numeric",
    "read_specs",
]
