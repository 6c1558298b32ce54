"""Checkpoints of a run of one process: complete or invisible, restored bit by bit."""

from vime_trainer.checkpoint._checkpoint import load_checkpoint, save_checkpoint, start_point
from vime_trainer.checkpoint._folders import CheckpointError, find_latest, list_steps, path_of
from vime_trainer.checkpoint._settings import CheckpointSettings
from vime_trainer.checkpoint._state import RunState

__all__ = [
    "CheckpointError",
    "CheckpointSettings",
    "RunState",
    "find_latest",
    "list_steps",
    "load_checkpoint",
    "path_of",
    "save_checkpoint",
    "start_point",
]
