"""Supervised fine-tuning from JSONL, without a buffer."""

from vime_trainer.settings.sft import DataSettings, SftSettings
from vime_trainer.sft._examples import DataError, Example, read_examples
from vime_trainer.sft._order import Cursor, Order
from vime_trainer.sft._run import run_sft
from vime_trainer.sft._train import SftStep, micro_batches, train_step

__all__ = [
    "Cursor",
    "DataError",
    "DataSettings",
    "Example",
    "Order",
    "SftSettings",
    "SftStep",
    "micro_batches",
    "read_examples",
    "run_sft",
    "train_step",
]
