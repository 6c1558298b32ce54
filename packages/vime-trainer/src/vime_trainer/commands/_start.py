"""What the commands that train do before they load anything heavy."""

from __future__ import annotations

from collections.abc import Sequence

from vime_proto.process import exit_with_parent
from vime_trainer.ranks import is_rank, rank_command, run_ranks
from vime_trainer.settings.rl import RlSettings
from vime_trainer.settings.sft import SftSettings


def start_ranks(name: str, settings: RlSettings | SftSettings, argv: Sequence[str], prog: str) -> int | None:
    """The exit status of the ranks that the settings ask for, once they ended; None in a process that does the work itself.

    Raises:
        ValueError: sizes that do not divide the number of ranks.
    """
    if settings.exit_with_parent:
        exit_with_parent()
    if not settings.ranks or is_rank():
        return None
    settings.parallel.check_world(settings.ranks)
    return run_ranks(settings.ranks, rank_command(name, argv), prog)
