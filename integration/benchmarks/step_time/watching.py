"""Waiting for a process that reports steps: until it has all of them, or its time or this script's is over."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

POLL_SECONDS = 0.2
_STOP_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a run may take.

    Attributes:
        start: seconds until its first step is reported.
        run: seconds from then on.
    """

    start: float
    run: float


class Asked:
    """Whether this script was asked to end (SIGTERM, Ctrl-C): while a process runs that is noted, otherwise it ends at once."""

    def __init__(self) -> None:
        self.signal = ""
        self._runs = False

    def listen(self) -> None:
        """From now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        self.signal = signal.Signals(number).name
        if not self._runs:
            self.obey()

    def obey(self) -> None:
        """Ends this script if it was asked to."""
        if self.signal:
            sys.exit(128 + signal.Signals[self.signal])

    @contextlib.contextmanager
    def running(self, command: list[str], stop: signal.Signals, **options: Any) -> Iterator[subprocess.Popen]:
        """Runs a process during the block and ends it after: by ``stop``, by force half a minute later."""
        self._runs = True
        try:
            # A signal meanwhile waits for the end of this.
            process = subprocess.Popen(command, **options)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(stop)
                    try:
                        process.wait(_STOP_SECONDS)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
        finally:
            self._runs = False

    def watch(self, process: subprocess.Popen, count: Callable[[], int], steps: int, limits: Limits) -> str:
        """Waits for ``steps`` steps; answers why it waits no longer.

        "" all steps are there; "limit"; the name of a signal; "exit" the process ended before.
        """
        begun, first = time.monotonic(), None
        while (found := count()) < steps:
            now = time.monotonic()
            if found and first is None:
                first = now
            if self.signal:
                return self.signal
            if process.poll() is not None:
                # It may have reported and ended since the count.
                return "" if count() >= steps else "exit"
            if now > (begun + limits.start if first is None else first + limits.run):
                return "limit"
            time.sleep(POLL_SECONDS)
        return ""
