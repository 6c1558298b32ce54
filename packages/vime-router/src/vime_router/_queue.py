"""Requests that wait for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import grpc

from vime_proto.errors import StatusError
from vime_router._fleet import Fleet
from vime_router._member import Member
from vime_router._request import Request

_CHANGED, _ABORTED = "changed", "aborted"


class Queue:
    """First come, first served: every change of the fleet lets waiting requests look again, in their order.

    Args:
        fleet: its changes wake the queue.
        timeout: longest wait in seconds.
        limit: most requests that wait.
        look: called when a request begins to wait, to have engines checked soon.
    """

    def __init__(self, fleet: Fleet, timeout: float, limit: int, look: Callable[[], None]):
        self._fleet, self._timeout, self._limit, self._look = fleet, timeout, limit, look
        self._waiting: dict[object, tuple[Request, asyncio.Future[str]]] = {}
        fleet.on_change = self._wake

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request: Request, pick: Callable[[], Member | None]) -> Member | None:
        """The first engine that ``pick`` answers; None when the request was aborted meanwhile.

        Raises:
            StatusError: UNAVAILABLE, when there is none in time, and why; RESOURCE_EXHAUSTED, when the queue is full.
        """
        if len(self._waiting) >= self._limit:
            raise StatusError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._limit} requests wait for an engine already: {self._fleet.obstacles(request.minimum_version)}",
                retry_after=1.0,
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        place = object()
        try:
            while True:
                woken: asyncio.Future[str] = loop.create_future()
                self._waiting[place] = (request, woken)
                self._look()
                try:
                    async with asyncio.timeout_at(deadline):
                        if await woken == _ABORTED:
                            return None
                except TimeoutError:
                    raise StatusError(
                        grpc.StatusCode.UNAVAILABLE,
                        f"no engine took the request within {self._timeout:g} s: "
                        f"{self._fleet.obstacles(request.minimum_version)}",
                        retry_after=1.0,
                    ) from None
                member = pick()
                if member is not None:
                    return member
        finally:
            self._waiting.pop(place, None)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends waiting requests; no ids ends all. Answers the ids of those that waited."""
        wanted = set(request_ids)
        ended = []
        for request, woken in self._waiting.values():
            if (not wanted or request.request_id in wanted) and not woken.done():
                woken.set_result(_ABORTED)
                ended.append(request.request_id)
        return ended

    def _wake(self) -> None:
        for _, woken in self._waiting.values():
            if not woken.done():
                woken.set_result(_CHANGED)
