"""`vime-trainer sft`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence

from vime_proto.process import exit_with_parent
from vime_proto.settings import load
from vime_trainer.profiler import requests_set
from vime_trainer.ranks import is_rank, lost_rank, rank, rank_command, run_ranks
from vime_trainer.settings.sft import SftSettings

__all__ = ["main"]


def main(argv: Sequence[str], prog: str) -> int:
    """Trains, then prints the folder of the trained model."""
    settings = load(SftSettings, argv, prog)
    if settings.exit_with_parent:
        exit_with_parent()
    if settings.ranks and not is_rank():
        settings.parallel.check_world(settings.ranks)
        return run_ranks(settings.ranks, rank_command("sft", argv), prog)
    from vime_trainer.sft import run_sft

    traced = threading.Event()
    with requests_set(traced):
        try:
            final = run_sft(settings, traced)
        except RuntimeError as error:
            lost = lost_rank(error)
            if lost is None:
                raise
            logging.getLogger(__name__).debug("traceback", exc_info=True)
            print(f"{prog}: {lost}", file=sys.stderr)
            return 1
    if rank() == 0:
        print(final)
    return 0
