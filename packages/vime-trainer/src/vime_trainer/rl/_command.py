"""`vime-trainer rl`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence

import grpc

from vime_proto.errors import describe
from vime_proto.process import exit_with_parent
from vime_proto.settings import load
from vime_trainer.profiler import requests_set
from vime_trainer.publish import PublishError
from vime_trainer.ranks import is_rank, rank_command, run_ranks

from ._buffer import LostLeaseError
from ._io import Interrupted
from ._run import signals_set, train
from ._settings import RlSettings
from ._team import one_line
from ._train import AlarmError

PROG = "vime-trainer rl"


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Runs the command; the exit status. SIGINT and SIGTERM end it with 0, at a point that a resume goes on from."""
    settings = load(RlSettings, argv, prog)
    if settings.exit_with_parent:
        exit_with_parent()
    if settings.ranks and not is_rank():
        settings.parallel.check_world(settings.ranks)
        return run_ranks(settings.ranks, rank_command("rl", argv), prog)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    interrupt, traced = threading.Event(), threading.Event()
    with signals_set(interrupt), requests_set(traced):
        try:
            reason = train(settings, _megatron, interrupt, traced)
        except Interrupted:
            print(f"{prog}: interrupted", file=sys.stderr)
            return 0
        except grpc.RpcError as error:
            return _fail(prog, describe(error))
        except (PublishError, LostLeaseError, AlarmError, ValueError, OSError, ImportError, RuntimeError) as error:
            return _fail(prog, one_line(error) if is_rank() else str(error))
    print(f"{prog}: {reason}", file=sys.stderr)
    return 0


def _megatron(settings: RlSettings):
    # Imported late: --help and a wrong key should not wait for Megatron.
    from ._megatron import MegatronBackend

    return MegatronBackend(settings)


def _fail(prog: str, reason: str) -> int:
    logging.getLogger(__name__).debug("traceback", exc_info=True)
    print(f"{prog}: {reason}", file=sys.stderr)
    return 1
