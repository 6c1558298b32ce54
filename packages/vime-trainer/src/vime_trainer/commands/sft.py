"""`vime-trainer sft`."""

from __future__ import annotations

from collections.abc import Sequence

from vime_proto.settings import load
from vime_trainer.sft import SftSettings, run_sft

__all__ = ["main"]


def main(argv: Sequence[str], prog: str) -> int:
    """Trains, then prints the folder of the trained model."""
    print(run_sft(load(SftSettings, argv, prog)))
    return 0
