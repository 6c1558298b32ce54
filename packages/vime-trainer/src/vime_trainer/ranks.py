"""Starting trainer ranks on this host, for those who have no torchrun at hand."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

__all__ = ["is_rank", "lost_rank", "rank", "rank_command", "run_ranks", "world_size"]

_POLL_SECONDS = 0.1
_GONE = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|Timed out|timed out")


def is_rank() -> bool:
    """Whether torchrun, `run_ranks` or something alike started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's rank; 0 when it is the only one."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def lost_rank(error: BaseException) -> str | None:
    """One line for an exchange that failed since another rank is gone, about which the library says pages; else None."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not _GONE.search(text):
        return None
    return f"another rank ended or does not answer ({text.splitlines()[0].split('. ')[0]})"


def rank_command(name: str, argv: Sequence[str]) -> list[str]:
    """`vime-trainer <name> <argv>` as one rank of several, which ends when its parent ends."""
    return [sys.executable, "-m", "vime_trainer", name, *argv, "--exit_with_parent=true"]


def run_ranks(count: int, command: Sequence[str], prog: str, grace_seconds: float = 10.0) -> int:
    """Runs a command as `count` processes with RANK and WORLD_SIZE, and waits for them; the exit status.

    Rank 0 writes to this process's streams; lines of the others go to standard error, each after its rank. SIGINT,
    SIGTERM and SIGUSR2 are passed on. When a rank fails, the others have a while to end by themselves.

    Args:
        count: ranks.
        command: see `rank_command`.
        prog: how this process calls itself, for its last line.
        grace_seconds: that while.
    """
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    # Ranks share the cores; each would take all of them.
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    children: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if number != signal.SIGUSR2:
            asked.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    try:
        for number in range(count):
            # Groups of their own: a Ctrl-C at the terminal reaches them through this process, once.
            child = subprocess.Popen(
                command,
                env={**common, "RANK": str(number), "LOCAL_RANK": str(number)},
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=None if number == 0 else subprocess.PIPE,
                stderr=None if number == 0 else subprocess.STDOUT,
            )
            children.append(child)
            if number:
                readers.append(threading.Thread(target=_show, args=(number, child.stdout), daemon=True))
                readers[-1].start()
        if asked:
            pass_on(signal.SIGTERM, None)
        failed = _wait(children, grace_seconds)
        _end(children)
        for reader in readers:
            reader.join(1.0)
        if failed is None:
            return 0
        status = children[failed].returncode
        if asked and status == -asked[0]:
            return 128 + asked[0]
        # Rank 0 has said why itself, unless it was killed.
        if failed != 0 or status < 0:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
            print(f"{prog}: rank {failed} {how}", file=sys.stderr, flush=True)
        return status if status > 0 else 1
    finally:
        _end(children)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen], grace: float) -> int | None:
    """Waits for all, or a while longer than for the first that fails: which that is, or None."""
    failed: int | None = None
    limit = float("inf")
    while time.monotonic() < limit:
        codes = [child.poll() for child in children]
        bad = [number for number, code in enumerate(codes) if code]
        if bad and failed is None:
            failed, limit = bad[0], time.monotonic() + grace
        if None not in codes:
            break
        running = next(child for child, code in zip(children, codes, strict=True) if code is None)
        try:
            running.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return failed


def _end(children: list[subprocess.Popen]) -> None:
    for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for child in children:
            if child.poll() is None:
                stop(child)
        end = time.monotonic() + 5.0
        for child in children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        else:
            return


def _show(number: int, stream) -> None:
    with stream:
        for line in stream:
            sys.stderr.write(f"[rank {number}] {line.decode(errors='replace')}")
            sys.stderr.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
