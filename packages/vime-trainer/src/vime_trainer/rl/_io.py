"""An event loop in a thread of its own, for the training thread to call into."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_IDLE_SECONDS = 1.0


class Interrupted(Exception):
    """The process was asked to end: what it does now is given up."""

    def __init__(self) -> None:
        super().__init__("interrupted")


class IoThread:
    """Servers, lease renewal and remote calls live here, so that they go on while the training thread computes.

    Args:
        interrupt: once set, waiting calls end with Interrupted.

    Attributes:
        idle: called every second or so while the training thread waits; may raise to end that.
    """

    def __init__(self, interrupt: threading.Event | None = None):
        self.interrupt = interrupt or threading.Event()
        self.idle: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="io", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine there and waits for it.

        Raises:
            Interrupted: the process should end; the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: concurrent.futures.Future[Result]) -> Result:
        """Waits for what another thread does; the answer or the exception.

        Raises:
            Interrupted: the process should end; the work goes on.
        """
        idle = time.monotonic() + _IDLE_SECONDS
        while True:
            try:
                return future.result(timeout=0.1)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
            if self.interrupt.is_set():
                raise Interrupted
            if time.monotonic() >= idle:
                self.idle()
                idle = time.monotonic() + _IDLE_SECONDS

    def finish(self, work: Coroutine[Any, Any, Result], timeout: float) -> Result:
        """As `run`, for cleaning up: it does not heed the interrupt but ends after `timeout` seconds.

        Raises:
            TimeoutError: it took longer.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"not done within {timeout:g} s") from None

    def spawn(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Starts a coroutine there; the future says how it ended."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5)
    await asyncio.get_running_loop().shutdown_asyncgens()
