"""Wakes long polls when something happened; nobody polls the database."""

from __future__ import annotations

import asyncio


class Changes:
    """A counter that can be waited on. For one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something changed."""
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seen: int, timeout: float) -> None:
        """Returns when the counter is no longer ``seen``, or after ``timeout`` seconds."""
        if self.count != seen or timeout <= 0:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the result.
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            return
        finally:
            self._waiting.discard(future)
