"""One answer while it grows, and for a while after, so that a repeated request replays it."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import grpc
import numpy as np

from vime_proto.common.v1.common_pb2 import PolicyVersion
from vime_proto.errors import StatusError
from vime_proto.version import show
from vime_rollout.engine._types import BackendDeadError, NotFiniteError, Output

Span = tuple[int, PolicyVersion]  # first token, weights


class Generation:
    """Tokens of one request, each stamped with the weights that produced it when it arrived.

    Args:
        request_id: as the caller names it.
        digest: of the request's payload.
        prompt: vocabulary ids.
        version: answers the weights served now; called for every output that arrives.
        message_tokens, message_seconds: how much new output, or how old, makes readers wake up.
        on_fault: called once when output arrives that makes the answer worthless.
    """

    def __init__(
        self,
        request_id: str,
        digest: bytes,
        prompt: Sequence[int],
        version: Callable[[], PolicyVersion],
        message_tokens: int,
        message_seconds: float,
        on_end: Callable[[Generation], None],
    ):
        self.request_id = request_id
        self.digest = digest
        self.prompt = prompt
        self.internal_id: str | None = None  # once the backend has it
        self.sent_under: PolicyVersion | None = None  # weights when the backend got it
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Sequence[tuple[int, float]]] = []
        self.spans: list[Span] = []
        self.cached_tokens: int | None = None
        self.finish: str | None = None
        self.stop_token: int | None = None
        self.routes: np.ndarray | None = None
        self.prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None
        self.error: Exception | None = None
        self.readers = 0
        self.dropped = False  # nobody reads it and it was ended for that
        self._version = version
        self._message_tokens = message_tokens
        self._message_seconds = message_seconds
        self._on_end = on_end
        self._wakers: set[asyncio.Event] = set()
        self._ripe = 0  # tokens that readers may take
        self._timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        """Whether nothing will be added."""
        return self.finish is not None or self.error is not None

    @property
    def last_version(self) -> PolicyVersion:
        """Weights of the last token; those served now when there is none."""
        return self.spans[-1][1] if self.spans else self._version()

    # Written by the backend -----------------------------------------------------------------------------------

    def put(self, output: Output | Exception) -> None:
        """Takes new output. What arrives after the end is ignored."""
        if self.done:
            return
        if isinstance(output, Exception):
            self.fail(output)
            return
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.tokens:
            fault = self._append(output)
            if fault is not None:
                self.fail(fault)
                return
        if output.finish == "error":
            self.fail(StatusError(grpc.StatusCode.INTERNAL, f"request {self.request_id!r}: the engine failed to go on"))
        elif output.finish is not None:
            self.stop_token, self.routes = output.stop_token, output.routes
            self.end(output.finish)
        elif len(self.tokens) - self._ripe >= self._message_tokens:
            self._wake()
        elif self._timer is None and self._wakers:
            self._timer = asyncio.get_running_loop().call_later(self._message_seconds, self._wake)

    def end(self, finish: str) -> None:
        """Ends the answer with what there is."""
        self.finish = finish
        if not self.spans:
            self.spans.append((0, self._version()))
        self._wake()
        self._on_end(self)

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error for every reader."""
        dead = isinstance(error, BackendDeadError)
        self.error = StatusError(grpc.StatusCode.UNAVAILABLE, str(error)) if dead else error
        self._wake()
        self._on_end(self)

    def _append(self, output: Output) -> NotFiniteError | None:
        version = self._version()
        for offset, value in enumerate(output.logprobs):
            if not math.isfinite(value):
                return NotFiniteError(
                    f"request {self.request_id!r}: the log-probability of token {len(self.tokens) + offset} (id "
                    f"{output.tokens[offset]}) is {value} under {show(version)}: the weights or the KV cache are not finite",
                )
        if not self.spans or self.spans[-1][1] is not version:
            self.spans.append((len(self.tokens), version))
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        if output.top is not None:
            self.top += output.top
        return None

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ripe = len(self.tokens)
        for waker in self._wakers:
            waker.set()

    # Read by callers ------------------------------------------------------------------------------------------

    async def parts(self):
        """Yields (start, stop, version, last) until the end: token ranges of one version each, from the first token on.

        Raises:
            StatusError: the error that ended the answer.
        """
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            if self.tokens:
                waker.set()
            start = 0
            while True:
                if not self.done:
                    await waker.wait()
                    waker.clear()
                if self.error is not None:
                    raise self.error
                ended = self.done
                stop = len(self.tokens)
                for low, high, version in self._ranges(start, stop):
                    yield low, high, version, ended and high == stop
                if ended:
                    if start == stop:
                        yield stop, stop, self.last_version, True
                    return
                start = stop
        finally:
            self._wakers.discard(waker)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, PolicyVersion]]:
        edges = [first for first, _ in self.spans[1:]] + [len(self.tokens)]
        cut = [
            (max(start, first), min(stop, edge), version)
            for (first, version), edge in zip(self.spans, edges, strict=True)
        ]
        return [(low, high, version) for low, high, version in cut if low < high]


class Registry:
    """Answers by request id: those that run, and a bounded number of those that ended."""

    def __init__(self, capacity: int, tokens: int):
        self._capacity = capacity
        self._tokens = tokens
        self._kept_tokens = 0
        self._running: dict[str, Generation] = {}
        self._ended: OrderedDict[str, Generation] = OrderedDict()

    @property
    def running(self) -> list[Generation]:
        """Answers that are not done, whether the backend has them or they wait."""
        return list(self._running.values())

    def get(self, request_id: str) -> Generation | None:
        """The answer of an id, if it runs or is still kept."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def add(self, generation: Generation) -> None:
        """Adds an answer that begins."""
        self._running[generation.request_id] = generation

    def forget(self, generation: Generation) -> None:
        """Drops an answer that is done: a repetition computes it again."""
        if self._ended.get(generation.request_id) is generation:
            del self._ended[generation.request_id]
            self._kept_tokens -= _size(generation)

    def ended(self, generation: Generation) -> None:
        """An answer is done: keeps it for repetitions unless it failed or was dropped, and forgets the oldest ones."""
        if self._running.get(generation.request_id) is generation:
            del self._running[generation.request_id]
        if generation.error is not None or generation.dropped:
            return
        self._ended[generation.request_id] = generation
        self._kept_tokens += _size(generation)
        while self._ended and (len(self._ended) > self._capacity or self._kept_tokens > self._tokens):
            _, oldest = self._ended.popitem(last=False)
            self._kept_tokens -= _size(oldest)


def _size(generation: Generation) -> int:
    return len(generation.prompt) + len(generation.tokens)
