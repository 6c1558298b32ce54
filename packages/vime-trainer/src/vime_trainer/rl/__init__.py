"""Reinforcement learning: the loop between buffer, model and engines."""

from ._backend import Backend, StepOutcome
from ._batches import FolderSource, read_groups, write_batch
from ._command import main
from ._io import Interrupted
from ._run import train
from ._settings import AlarmSettings, EvaluationSettings, RlSettings

__all__ = [
    "AlarmSettings",
    "Backend",
    "EvaluationSettings",
    "FolderSource",
    "Interrupted",
    "RlSettings",
    "StepOutcome",
    "main",
    "read_groups",
    "train",
    "write_batch",
]
