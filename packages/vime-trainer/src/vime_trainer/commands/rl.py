"""`vime-trainer rl`."""

from __future__ import annotations

from collections.abc import Sequence

from vime_proto.settings import load
from vime_trainer.commands._start import start_ranks
from vime_trainer.settings.rl import RlSettings

__all__ = ["main"]


def main(argv: Sequence[str], prog: str = "vime-trainer rl") -> int:
    """Runs the command; the exit status. SIGINT and SIGTERM end it with 0, at a point that a resume goes on from."""
    settings = load(RlSettings, argv, prog)
    status = start_ranks("rl", settings, argv, prog)
    if status is not None:
        return status
    from vime_trainer.rl._command import run

    return run(settings, prog)
