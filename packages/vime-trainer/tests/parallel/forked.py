"""Forks the ranks of a script from one process that has imported what all need: ``forked.py WORLD ERRORS SCRIPT ARGUMENT ...``.

Standard error of rank N goes to ERRORS/N. Ends with 0 when all ranks did; the first that fails ends the others.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import torch

import vime_trainer.checkpoint
import vime_trainer.policy  # noqa: F401
from vime_proto.process import exit_with_parent


def rank(number: int, errors: Path, script: str) -> int:
    """Runs the script as one rank; its exit status."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    os.dup2(os.open(errors / str(number), os.O_CREAT | os.O_WRONLY), 2)
    if torch.cuda.device_count():
        # CUDA does not survive a fork.
        os.execv(sys.executable, [sys.executable, "-W", "ignore", script, *sys.argv[1:]])
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else error.code is not None
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    exit_with_parent()
    world, errors, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    del sys.argv[:3]
    running = set()
    for number in range(world):
        pid = os.fork()
        if pid == 0:
            status = rank(number, errors, script)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        running.add(pid)
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not failed:
            failed = 1
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
