"""Rollout worker: prompts in, scored groups out. The public names here are all that a plug-in needs."""

from vime_rollout.worker._cli import main, run_worker
from vime_rollout.worker._environment import (
    Environment,
    Observation,
    Response,
    SingleTurn,
    Task,
)
from vime_rollout.worker._fanout import train_once
from vime_rollout.worker._settings import SamplingSettings, WorkerSettings
from vime_rollout.worker._tokenizer import Message, Tokenizer

__all__ = [
    "Environment",
    "Message",
    "Observation",
    "Response",
    "SamplingSettings",
    "SingleTurn",
    "Task",
    "Tokenizer",
    "WorkerSettings",
    "main",
    "run_worker",
    "train_once",
]
