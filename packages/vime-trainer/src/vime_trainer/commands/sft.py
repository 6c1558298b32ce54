"""`vime-trainer sft`."""

from __future__ import annotations

from collections.abc import Sequence

from vime_proto.process import exit_with_parent
from vime_proto.settings import load
from vime_trainer.sft import SftSettings, run_sft

__all__ = ["main"]


def main(argv: Sequence[str], prog: str) -> int:
    """Trains, then prints the folder of the trained model."""
    settings = load(SftSettings, argv, prog)
    if settings.exit_with_parent:
        exit_with_parent()
    print(run_sft(settings))
    return 0
