"""Life and death of a stage's process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def exit_with_parent(poll_seconds: float = 0.5) -> None:
    """Ends this process when its parent ends, however the parent ends.

    On Linux the kernel sends SIGTERM when the parent's *thread* that started us ends; a watch on the parent's process id backs
    that up and covers other systems.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent or parent == 1:
        os._exit(1)

    def watch() -> None:
        grace = threading.Event()
        while os.getppid() == parent:
            grace.wait(poll_seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        grace.wait(5.0)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def write_address_file(path: str | os.PathLike[str], address: str) -> None:
    """Writes ``host:port`` in one step, so that a reader sees the whole of it or nothing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    with os.fdopen(handle, "w") as file:
        file.write(address)
    os.replace(name, target)


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGINT and SIGTERM set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, event.set)
    return event


async def until_stopped() -> None:
    """Waits for SIGINT or SIGTERM."""
    await stop_event().wait()
