"""Generations of the fake engine: each runs once, and whoever asks for its id reads the same messages."""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator

import grpc
import numpy as np

from vime_proto.engine_state import SERVING, Admission
from vime_proto.errors import StatusError
from vime_proto.fakes import build
from vime_proto.fakes._sampling import Sampler
from vime_proto.fakes._toy_model import EXPERTS, MAX_MODEL_LEN
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_numpy, to_tensor

_REMEMBERED = 1000


class Generation:
    """One request: its messages so far, and a task that adds to them."""

    def __init__(self, request: pb.GenerateRequest):
        self.request = request
        self.messages: list[pb.GenerateResponse] = []
        self.error: Exception | None = None
        self.done = False
        self.abort = False
        self.stepping = False
        self.readers = 0
        self.changed = asyncio.Event()
        self.task: asyncio.Task | None = None

    def wake(self) -> None:
        """Tells readers that something changed."""
        self.changed.set()
        self.changed = asyncio.Event()


class Generations:
    """All generations of an engine.

    Args:
        engine: has `machine`, `model`, `engine_id`, `step_seconds`, `frozen` and `state_changed` (asyncio.Condition).
    """

    def __init__(self, engine):
        self._engine = engine
        self._known: OrderedDict[str, Generation] = OrderedDict()
        self.waiting = 0

    @property
    def open(self) -> list[Generation]:
        """Those that run or wait."""
        return [one for one in self._known.values() if not one.done]

    async def read(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """The messages of a request from the first on. When its last reader leaves, it ends."""
        one = self._known.get(request.request_id)
        if one is None:
            one = self._known[request.request_id] = Generation(request)
            one.task = asyncio.create_task(self._run(one))
            while len(self._known) > _REMEMBERED and next(iter(self._known.values())).done:
                self._known.popitem(last=False)
        elif one.request != request:
            message = f"request_id {request.request_id!r} was used with another payload"
            raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, message, [("request_id", message)])
        one.readers += 1
        try:
            sent = 0
            while True:
                while sent < len(one.messages):
                    sent += 1
                    yield one.messages[sent - 1]
                if one.error is not None:
                    raise one.error
                if one.done:
                    return
                await one.changed.wait()
        finally:
            one.readers -= 1
            if not one.readers and not one.done:
                one.task.cancel()
            if one.error is not None or not one.done:
                self._known.pop(request.request_id, None)

    async def _run(self, one: Generation) -> None:
        try:
            await self._generate(one)
        except StatusError as error:
            one.error = error
        except asyncio.CancelledError:
            one.error = StatusError(grpc.StatusCode.UNAVAILABLE, f"engine {self._engine.engine_id!r} is stopping")
        finally:
            one.done, one.stepping = True, False
            one.wake()
            async with self._engine.state_changed:
                self._engine.state_changed.notify_all()

    async def admit(self, aborted=lambda: False) -> bool:
        """Waits until requests run; False when it was aborted meanwhile.

        Raises:
            StatusError: UNAVAILABLE, in a state that takes no requests.
        """
        engine = self._engine
        self.waiting += 1
        try:
            async with engine.state_changed:
                while not aborted():
                    if engine.machine.admission is Admission.RUN:
                        return True
                    if engine.machine.admission is Admission.REFUSE:
                        raise engine.unavailable()
                    await engine.state_changed.wait()
            return False
        finally:
            self.waiting -= 1

    async def _generate(self, one: Generation) -> None:
        engine, request = self._engine, one.request
        if not await self.admit(lambda: one.abort):
            self._finish(one, 0, sample_pb2.FINISH_REASON_ABORT)
            return
        engine.check_minimum(request)
        one.stepping = True
        tokens = to_numpy(request.prompt_token_ids).astype(np.int64)
        sampler = Sampler(request.sampling, zlib.crc32(request.request_id.encode()))
        limit = min(request.sampling.max_new_tokens, MAX_MODEL_LEN - len(tokens))
        made = 0
        while True:
            if engine.frozen:
                async with engine.state_changed:
                    await engine.state_changed.wait_for(lambda: not engine.frozen or one.abort)
                if engine.machine.admission is Admission.REFUSE and not one.abort:
                    raise engine.unavailable()
            if one.abort:
                self._finish(one, made, sample_pb2.FINISH_REASON_ABORT, tokens)
                return
            engine.busy += 1
            try:
                await asyncio.sleep(engine.step_seconds)
                token, message = self._step(one, sampler, tokens)
            finally:
                engine.busy -= 1
            if engine.machine.state != SERVING:
                # Whoever paused the engine waits for steps to end.
                async with engine.state_changed:
                    engine.state_changed.notify_all()
            if one.abort:
                # The step was under way when the abort came; its token was not returned and does not count.
                continue
            one.messages.append(message)
            one.wake()
            tokens = np.append(tokens, token)
            made += 1
            if sampler.stop(token):
                self._finish(one, made, sample_pb2.FINISH_REASON_STOP, tokens, token)
                return
            if made >= limit:
                self._finish(one, made, sample_pb2.FINISH_REASON_LENGTH, tokens)
                return

    def _step(self, one: Generation, sampler: Sampler, tokens: np.ndarray) -> tuple[int, pb.GenerateResponse]:
        engine, request = self._engine, one.request
        logits = engine.model.logits(tokens)[-1]
        token, logprobs, kept = sampler.draw(logits, request.logprob_mode == sample_pb2.LOGPROB_MODE_RAW)
        message = self._message(one)
        message.token_ids.CopyFrom(build.ids([token]))
        message.logprobs.CopyFrom(build.floats([logprobs[token]]))
        if request.top_logprobs:
            message.top_logprobs.CopyFrom(top_logprobs(logprobs[None], request.top_logprobs))
        if kept is not None:
            message.kept_token_ids.values.CopyFrom(to_tensor(kept))
            message.kept_token_ids.offsets.CopyFrom(to_tensor(np.array([0, len(kept)], np.uint64)))
        if not one.messages:
            message.cached_tokens = 0
        return token, message

    def _message(self, one: Generation) -> pb.GenerateResponse:
        engine = self._engine
        return pb.GenerateResponse(
            request_id=one.request.request_id, version=engine.last_version, engine_id=engine.engine_id
        )

    def _finish(
        self, one: Generation, made: int, reason: int, tokens: np.ndarray | None = None, stop: int | None = None
    ) -> None:
        message = self._message(one)
        message.finish_reason = reason
        if stop is not None:
            message.stop_token_id, message.stop_included = stop, True
        start = one.request.routing_start_row
        if one.request.return_routing and tokens is not None and made and start < len(tokens) - 1:
            routes = self._engine.model.routes(tokens[start:-1])
            message.routing.CopyFrom(build.trace(routes, self._engine.last_version, EXPERTS))
        one.messages.append(message)


def top_logprobs(logprobs: np.ndarray, count: int) -> sample_pb2.TopLogprobs:
    """The most likely tokens of each row of log-probs [n, VOCAB]."""
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
    values = np.take_along_axis(logprobs, order, axis=-1)
    return sample_pb2.TopLogprobs(
        token_ids=to_tensor(order.astype(np.int32)), logprobs=to_tensor(values.astype(np.float32))
    )
