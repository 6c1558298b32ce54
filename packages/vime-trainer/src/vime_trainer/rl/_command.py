"""A run as a process: its signals, and the line that it ends with."""

from __future__ import annotations

import logging
import sys
import threading

import grpc

from vime_proto.errors import describe
from vime_trainer.profiler import requests_set
from vime_trainer.publish import PublishError
from vime_trainer.ranks import is_rank
from vime_trainer.settings.rl import RlSettings

from ._buffer import LostLeaseError
from ._io import Interrupted
from ._megatron import MegatronBackend
from ._run import signals_set, train
from ._team import one_line
from ._train import AlarmError


def run(settings: RlSettings, prog: str) -> int:
    """Trains; the exit status. SIGINT and SIGTERM end it with 0."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    interrupt, traced = threading.Event(), threading.Event()
    with signals_set(interrupt), requests_set(traced):
        try:
            reason = train(settings, MegatronBackend, interrupt, traced)
        except Interrupted:
            print(f"{prog}: interrupted", file=sys.stderr)
            return 0
        except grpc.RpcError as error:
            return _fail(prog, describe(error))
        except (PublishError, LostLeaseError, AlarmError, ValueError, OSError, ImportError, RuntimeError) as error:
            return _fail(prog, one_line(error) if is_rank() else str(error))
    print(f"{prog}: {reason}", file=sys.stderr)
    return 0


def _fail(prog: str, reason: str) -> int:
    logging.getLogger(__name__).debug("traceback", exc_info=True)
    print(f"{prog}: {reason}", file=sys.stderr)
    return 1
