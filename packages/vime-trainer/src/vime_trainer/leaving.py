"""The end of a process whose threads still work on something that others could see half done.

A thread that is cut off by the interpreter's end while it waits in a collective takes the whole process down with it
(SIGABRT, status 134). So the end waits for it a while, and then leaves without taking anything down.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable

__all__ = ["leave", "wait_for"]

_SECONDS = 4.0
"""Whoever asked a process to end wants it gone within a few seconds."""

_waits: list[weakref.WeakMethod] = []


def wait_for(work: Callable[[float], str | None]) -> None:
    """The process does not end before `work` had its time.

    Args:
        work: a bound method, not kept alive by this: called with the seconds that it may take; says what is left undone,
            or None.
    """
    if not _waits:
        atexit.register(leave, 1)
    _waits.append(weakref.WeakMethod(work))


def leave(status: int) -> None:
    """Waits for all work; what stays undone is said on stderr, and the process ends here with `status`.

    Returns when nothing is undone. Ends that nobody calls it for, such as those by an exception, have status 1.
    """
    undone = [text for ref in _waits if (work := ref()) is not None and (text := work(_SECONDS)) is not None]
    if not undone:
        return
    for text in undone:
        print(f"vime-trainer: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
