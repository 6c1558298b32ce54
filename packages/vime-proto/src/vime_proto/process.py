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
# As early as can be: a parent that ends while we still import is seen to have ended.
_parent = os.getppid()


def _forked() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_forked)


def exit_with_parent(poll_seconds: float = 0.5) -> None:
    """Ends this process when its parent ends, however the parent ends.

    On Linux the kernel sends SIGTERM when the parent's *thread* that started us ends; a watch on the parent's process id backs
    that up and covers other systems. Process 1 is a parent like any other (in a container it may be what started us); it ends
    together with everything else, so that nothing has to be watched.
    """
    parent = _parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    if parent == 1:
        return

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
    """An event of the running loop that SIGINT and SIGTERM set.

    A server takes it before it tells anyone its address: whoever reads the address may ask it to stop at once.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, event.set)
    return event
