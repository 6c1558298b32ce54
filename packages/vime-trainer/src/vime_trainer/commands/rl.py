"""`vime-trainer rl`."""

from __future__ import annotations

from collections.abc import Sequence

from vime_proto.process import exit_with_parent
from vime_proto.settings import load
from vime_trainer.ranks import is_rank, rank_command, run_ranks
from vime_trainer.settings.rl import RlSettings

__all__ = ["main"]


def main(argv: Sequence[str], prog: str = "vime-trainer rl") -> int:
    """Runs the command; the exit status. SIGINT and SIGTERM end it with 0, at a point that a resume goes on from."""
    settings = load(RlSettings, argv, prog)
    if settings.exit_with_parent:
        exit_with_parent()
    if settings.ranks and not is_rank():
        settings.parallel.check_world(settings.ranks)
        return run_ranks(settings.ranks, rank_command("rl", argv), prog)
    from vime_trainer.rl._command import run

    return run(settings, prog)
