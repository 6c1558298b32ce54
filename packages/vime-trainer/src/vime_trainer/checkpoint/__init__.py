"""Checkpoints of a run of any number of ranks: complete or invisible, restored bit by bit under any other cut."""

from vime_trainer.checkpoint._checkpoint import (
    POLICY,
    load_checkpoint,
    load_models,
    save_checkpoint,
    start_point,
)
from vime_trainer.checkpoint._folders import CheckpointError, find_latest, list_steps, path_of
from vime_trainer.checkpoint._models import Trained
from vime_trainer.checkpoint._saver import Saver
from vime_trainer.checkpoint._state import RunState
from vime_trainer.settings.checkpoint import CheckpointSettings

__all__ = [
    "POLICY",
    "CheckpointError",
    "CheckpointSettings",
    "RunState",
    "Saver",
    "Trained",
    "find_latest",
    "list_steps",
    "load_checkpoint",
    "load_models",
    "path_of",
    "save_checkpoint",
    "start_point",
]
