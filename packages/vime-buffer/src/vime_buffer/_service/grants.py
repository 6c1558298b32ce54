"""Grants to callers who left: what was lent before an answer that nobody heard goes back at once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from vime_buffer._service.core import Core, Response
from vime_buffer._store import leases, requests
from vime_buffer._store.database import Transaction
from vime_proto.buffer.v1 import buffer_pb2 as pb


@dataclasses.dataclass
class _Asked:
    """One request id: how many calls of it are open, and whether one of them was answered."""

    calls: int = 0
    heard: bool = False


class Grants:
    """Long polls that lend something.

    A look that has begun is never cut off, so it may grant something although its caller is gone. A caller who only lost the
    connection asks again under the same request id and gets that answer. When nobody does, the grant and its answer are undone:
    otherwise it would rest until it lapses, and a run without slack would stand still for as long.

    Args:
        core: database and tasks.
    """

    def __init__(self, core: Core):
        self._core = core
        self._asked: dict[tuple[str, str, str], _Asked] = {}

    async def poll(self, request, look: Callable[[bool], Awaitable[Response]]) -> Response:
        """Repeats ``look(is_last)`` until it grants something, the data ends or the wait is over.

        Args:
            request: LeasePromptsRequest or LeaseBatchRequest.
            look: answers what there is now.
        """
        key = (type(request).DESCRIPTOR.name, request.run_id, request.request_id)
        asked = self._asked.setdefault(key, _Asked())
        asked.calls += 1
        looking: asyncio.Task | None = None

        async def look_to_the_end(last: bool) -> Response:
            nonlocal looking
            looking = self._core.finish(look(last))
            return await asyncio.shield(looking)

        try:
            answer = await self._core.poll(
                request.wait_seconds, look_to_the_end, lambda one: one.outcome == pb.LEASE_OUTCOME_EMPTY
            )
        except asyncio.CancelledError:
            self._core.finish(self._leave(key, asked, looking))
            raise
        except BaseException:
            self._drop(key, asked)
            raise
        asked.heard = True
        self._drop(key, asked)
        return answer

    def _drop(self, key: tuple[str, str, str], asked: _Asked) -> bool:
        """Notes that a call has ended; answers whether it was the last one and none was answered."""
        asked.calls -= 1
        if asked.calls:
            return False
        del self._asked[key]
        return not asked.heard

    async def _leave(self, key: tuple[str, str, str], asked: _Asked, looking: asyncio.Task | None) -> None:
        if looking is not None:
            await asyncio.wait({looking})
        # From here to the queue of the writer nothing waits: a repetition comes either before the check or after the undoing.
        if self._drop(key, asked):
            await self._core.database.run(lambda tx: _undo(tx, *key))


def _undo(tx: Transaction, method: str, run_id: str, request_id: str) -> None:
    kept = requests.take_out(tx, run_id, method, request_id)
    if kept is None:
        return
    if method == pb.LeaseBatchRequest.DESCRIPTOR.name:
        ids = [pb.LeaseBatchResponse.FromString(kept).lease_id]
    else:
        ids = [lease.lease_id for lease in pb.LeasePromptsResponse.FromString(kept).leases]
    leases.take_back(tx, run_id, ids, "its caller left")
