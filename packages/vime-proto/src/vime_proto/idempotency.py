"""Answers a repeated request with its first answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from vime_proto.errors import ContractError, StatusError

Response = TypeVar("Response", bound=Message)


class RequestLog:
    """Remembers answers by request id, for a stated time and number of requests.

    A repeated id with the same payload gets the first answer and changes nothing; concurrent repetitions share one
    execution. A failure is not remembered, so that a retry runs again. Not thread-safe: one event loop uses it.

    Args:
        keep_seconds: how long an answer is kept.
        capacity: most answers kept; the oldest go first.
        clock: seconds, monotonic.
    """

    def __init__(
        self, keep_seconds: float = 3600.0, capacity: int = 100_000, clock: Callable[[], float] = time.monotonic
    ):
        self._keep_seconds = keep_seconds
        self._capacity = capacity
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], tuple[float, bytes, asyncio.Future]] = OrderedDict()

    async def run(self, request_id: str, request: Message, execute: Callable[[], Awaitable[Response]]) -> Response:
        """Answers of ``execute()``, run at most once per id and payload.

        Raises:
            ContractError: an empty id.
            StatusError: INVALID_ARGUMENT, when the id was used with another payload.
        """
        if not request_id:
            raise ContractError("request_id", "must not be empty")
        self._forget_old()
        key = (request.DESCRIPTOR.full_name, request_id)
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        known = self._entries.get(key)
        if known is not None:
            _, first, future = known
            if first != digest:
                message = f"request_id {request_id!r} was used with another payload"
                raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, message, [("request_id", message)])
            return await asyncio.shield(future)
        future = asyncio.ensure_future(execute())
        self._entries[key] = (self._clock(), digest, future)
        # The work goes on when the caller is gone: its repetition must find the answer.
        future.add_done_callback(lambda done: self._drop_failure(key, done))
        return await asyncio.shield(future)

    def _drop_failure(self, key: tuple[str, str], done: asyncio.Future) -> None:
        if done.cancelled() or done.exception() is not None:
            self._entries.pop(key, None)

    def _forget_old(self) -> None:
        horizon = self._clock() - self._keep_seconds
        while self._entries:
            key, (when, _, future) = next(iter(self._entries.items()))
            if not future.done() or (when >= horizon and len(self._entries) < self._capacity):
                return
            del self._entries[key]
