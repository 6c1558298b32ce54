"""Reinforcement-learning algorithms: two functions each, over per-token streams."""

from ._aggregation import AGGREGATIONS, token_weights
from ._corrections import CORRECTIONS, check_correction, correction_weights
from ._groups import GroupStatistics, centred, group_statistics
from ._kl import kl_terms
from ._objective import Objective, objective
from ._objectives import clipped, log_ratio, token_clipped_loss
from ._registry import ALGORITHMS, get_algorithm
from ._settings import AlgorithmSettings, KlSettings
from ._types import Algorithm, RolloutBatch, Streams, Terms
from .dapo import overlong_penalty

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
    "centred",
    "check_correction",
    "clipped",
    "correction_weights",
    "get_algorithm",
    "group_statistics",
    "kl_terms",
    "log_ratio",
    "objective",
    "overlong_penalty",
    "token_clipped_loss",
    "token_weights",
]
