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
from vime_trainer.publish import PublishError

from ._buffer import LostLeaseError
from ._io import Interrupted
from ._run import signals_set, train
from ._settings import RlSettings
from ._train import AlarmError

PROG = "vime-trainer rl"


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Runs the command; the exit status. SIGINT and SIGTERM end it with 0, at a point that a resume goes on from."""
    settings = load(RlSettings, argv, prog)
    if settings.exit_with_parent:
        exit_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    interrupt = threading.Event()
    with signals_set(interrupt):
        try:
            reason = train(settings, _megatron, interrupt)
        except Interrupted:
            print(f"{prog}: interrupted", file=sys.stderr)
            return 0
        except grpc.RpcError as error:
            return _fail(prog, describe(error))
        except (PublishError, LostLeaseError, AlarmError, ValueError, OSError, ImportError, RuntimeError) as error:
            return _fail(prog, str(error))
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
