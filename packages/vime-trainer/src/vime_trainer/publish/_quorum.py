"""Whether enough engines are ready for any of them to commit."""

from __future__ import annotations

import asyncio


class Quorum:
    """Decides once: yes as soon as `need` of `count` members are ready, no as soon as that has become impossible."""

    def __init__(self, need: int, count: int):
        self._need = need
        self._left = count
        self._ready = 0
        self._decision: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._decide()

    async def ready(self) -> bool:
        """One member is ready; waits for the decision."""
        self._ready += 1
        self._left -= 1
        self._decide()
        return await asyncio.shield(self._decision)

    def failed(self) -> None:
        """One member will not be ready."""
        self._left -= 1
        self._decide()

    def _decide(self) -> None:
        if self._decision.done():
            return
        if self._ready >= self._need:
            self._decision.set_result(True)
        elif self._ready + self._left < self._need:
            self._decision.set_result(False)
