"""Reinforcement learning: the loop between buffer, model and engines."""

from vime_trainer.commands.rl import main
from vime_trainer.settings.rl import AlarmSettings, EvaluationSettings, RlSettings

from ._backend import Backend, StepOutcome
from ._batches import FolderSource, read_groups, write_batch
from ._io import Interrupted
from ._run import train

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
