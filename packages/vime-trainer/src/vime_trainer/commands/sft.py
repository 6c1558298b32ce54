"""`vime-trainer sft`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence

from vime_proto.settings import load
from vime_trainer.commands._start import start_ranks
from vime_trainer.profiler import requests_set
from vime_trainer.ranks import lost_rank, rank
from vime_trainer.settings.sft import SftSettings

__all__ = ["main"]


def main(argv: Sequence[str], prog: str) -> int:
    """Trains, then prints the folder of the trained model."""
    settings = load(SftSettings, argv, prog)
    status = start_ranks("sft", settings, argv, prog)
    if status is not None:
        return status
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
