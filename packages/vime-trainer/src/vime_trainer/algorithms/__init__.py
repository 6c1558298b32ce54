"""Reinforcement-learning algorithms: two functions each, over per-token streams."""

from ._advantages import advantage_streams, required_columns
from ._aggregation import AGGREGATIONS, token_weights
from ._corrections import CORRECTIONS, check_correction, correction_scale, correction_weights, sequence_mask
from ._gae import gae, normalised
from ._groups import GroupStatistics, centred, group_statistics
from ._kl import kl_terms
from ._objective import Objective, critic_objective, objective
from ._objectives import clipped, log_ratio, token_clipped_loss
from ._proximal import proximal_alpha
from ._registry import ALGORITHMS, algorithm_of, get_algorithm
from ._rewards import kl_penalty, token_rewards
from ._settings import AlgorithmSettings, KlSettings
from ._types import Algorithm, RolloutBatch, Streams, Terms, proximal_logprobs
from .dapo import overlong_penalty
from .ppo import value_loss

__all__ = [
    "AGGREGATIONS",
    "ALGORITHMS",
    "CORRECTIONS",
    "Algorithm",
    "AlgorithmSettings",
    "GroupStatistics",
    "KlSettings",
    "Objective",
    "RolloutBatch",
    "Streams",
    "Terms",
    "advantage_streams",
    "algorithm_of",
    "centred",
    "check_correction",
    "clipped",
    "correction_scale",
    "correction_weights",
    "critic_objective",
    "gae",
    "get_algorithm",
    "group_statistics",
    "kl_penalty",
    "kl_terms",
    "log_ratio",
    "normalised",
    "objective",
    "overlong_penalty",
    "proximal_alpha",
    "proximal_logprobs",
    "required_columns",
    "sequence_mask",
    "token_clipped_loss",
    "token_rewards",
    "token_weights",
    "value_loss",
]
