"""Optimizer and learning-rate schedules."""

from vime_trainer.optim._optimizer import Optimizer, StepResult
from vime_trainer.optim._schedule import learning_rate
from vime_trainer.settings.optimizer import OptimizerSettings

__all__ = ["Optimizer", "OptimizerSettings", "StepResult", "learning_rate"]
