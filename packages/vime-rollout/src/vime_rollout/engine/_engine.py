"""The engine: state machine, requests and backend, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Iterable

import grpc

from vime_proto.common.v1.common_pb2 import PolicyVersion
from vime_proto.engine_state import Admission, EngineMachine, state_name
from vime_proto.errors import ContractError, StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.version import policy_version, satisfies, show
from vime_rollout.engine._generation import Generation, Registry
from vime_rollout.engine._model import ModelDescription
from vime_rollout.engine._settings import EngineSettings
from vime_rollout.engine._types import BackendDeadError, NotFiniteError, Sampling

log = logging.getLogger(__name__)


class Engine:
    """What both services share.

    Attributes:
        machine: the state.
        backend: see ``backend.Backend``; tests may give another.
        registry: answers by request id.
    """

    def __init__(self, settings: EngineSettings, model: ModelDescription, backend):
        self.settings = settings
        self.model = model
        self.backend = backend
        self.machine = EngineMachine()
        self.registry = Registry(settings.replay_capacity, settings.replay_tokens)
        self.poisoned = False  # something not finite was computed, and may lie in the KV cache
        self.capabilities: dict[str, str] = {}
        # One object per version: stamps are compared by identity.
        self._stamp = policy_version(settings.run_id, 0, 0)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._waiting = 0
        self._tasks: set[asyncio.Task] = set()

    # State ----------------------------------------------------------------------------------------------------

    def stamp(self) -> PolicyVersion:
        """The weights that output which arrives now was computed with."""
        return self._stamp

    def changed(self) -> None:
        """The state changed: wakes requests that wait for it, and takes over a new version."""
        version = self.machine.version
        if version is not None and version != self._stamp:
            self._stamp = version
        self._pulse()

    def _pulse(self) -> None:
        """Makes every request that waits look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_changed(self) -> None:
        """Waits until the state has changed."""
        await self._changed.wait()

    def status(self) -> pb.EngineStatus:
        """The status now."""
        status = pb.EngineStatus(
            engine_id=self.settings.engine_id,
            running=self.backend.unfinished,
            waiting=self._waiting,
            layout=self.backend.layout,
            gpu_uuids=self.backend.gpu_uuids,
            transports=self.transports,
            kernel_backends=self.backend.kernels,
        )
        return self.machine.fill(status)

    @property
    def transports(self) -> list[str]:
        """Kinds of transport that it can receive by."""
        return ["shm", "stream"] + (["file"] if self.settings.file_root else [])

    # Requests -------------------------------------------------------------------------------------------------

    async def generation(
        self,
        request_id: str,
        payload: bytes,
        prompt: list[int],
        sampling: Sampling,
        minimum: PolicyVersion | None = None,
        priority: int = 0,
    ) -> Generation:
        """The answer of a request: a running or kept one under the same id, or a new one.

        Raises:
            ContractError: the id was used with another payload.
            StatusError: UNAVAILABLE (asleep, stale, starting) or FAILED_PRECONDITION (minimum version).
        """
        digest = hashlib.sha256(payload).digest()
        known = self.registry.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise ContractError("request_id", f"{request_id!r} was used with another payload")
            return known
        generation = Generation(
            request_id, digest, prompt, self.stamp,
            self.settings.message_tokens, self.settings.message_seconds, self._ended,
        )  # fmt: skip
        self.registry.add(generation)
        try:
            if not self._may_run(minimum):
                await self._admit(generation, minimum)
            if not generation.done:
                generation.sent_under = self._stamp
                sending = self.backend.submit(request_id, prompt, sampling, generation.put, priority)
                generation.internal_id = await sending
        except (BackendDeadError, ContractError, StatusError) as error:
            generation.fail(error)
        except ValueError as error:
            # vLLM's own refusals.
            generation.fail(StatusError(grpc.StatusCode.INVALID_ARGUMENT, f"request {request_id!r}: {error}"))
        except BaseException:
            generation.dropped = True
            generation.end("abort")
            raise
        return generation

    def _may_run(self, minimum: PolicyVersion | None) -> bool:
        admission = self.machine.admission
        if admission is Admission.REFUSE:
            state, reason = state_name(self.machine.state), self.machine.reason
            about = f" ({reason})" if reason else ""
            raise StatusError(
                grpc.StatusCode.UNAVAILABLE, f"engine {self.settings.engine_id!r} is {state}{about}", retry_after=1.0
            )
        return admission is Admission.RUN and (minimum is None or satisfies(self._stamp, minimum))

    async def _admit(self, generation: Generation, minimum: PolicyVersion | None) -> None:
        """Waits until the request may run, or was aborted meanwhile."""
        deadline = None if minimum is None else time.monotonic() + self.settings.minimum_version_seconds
        self._waiting += 1
        try:
            while not generation.done and not self._may_run(minimum):
                serving = self.machine.admission is Admission.RUN
                if serving and deadline is not None and time.monotonic() >= deadline:
                    raise StatusError(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"request {generation.request_id!r} needs {show(minimum)}, engine {self.settings.engine_id!r} has "
                        f"{show(self._stamp)}",
                    )
                left = max(0.0, deadline - time.monotonic()) if serving and deadline is not None else None
                # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            self._waiting -= 1

    def _ended(self, generation: Generation) -> None:
        self.registry.ended(generation)
        self.poisoned |= isinstance(generation.error, NotFiniteError)
        self._idle.set()
        if generation.error is not None and generation.internal_id is not None:
            self.spawn(self._abort_quietly([generation.internal_id]))

    async def release(self, generation: Generation) -> None:
        """A reader is gone: an answer that nobody reads any more is ended, and a repetition starts afresh."""
        generation.readers -= 1
        if generation.readers > 0 or generation.done:
            return
        generation.dropped = True
        await self.end_requests([generation])

    async def end_requests(self, generations: Iterable[Generation]) -> list[str]:
        """Ends answers with what they have; their ids."""
        running = [one for one in generations if not one.done]
        await self._abort_quietly([one.internal_id for one in running if one.internal_id is not None])
        for one in running:
            if not one.done:  # it waited, or was on its way
                one.end("abort")
        self._pulse()
        return [one.request_id for one in running]

    async def idle(self, seconds: float) -> bool:
        """Waits until the backend has no request; whether it has none within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.backend.unfinished:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._idle.wait()
        return True

    async def _abort_quietly(self, internal_ids: list[str]) -> None:
        with contextlib.suppress(BackendDeadError):
            await self.backend.abort(internal_ids)

    def spawn(self, work) -> None:
        """Runs a coroutine beside the calls; its failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(
            lambda done: done.cancelled() or done.exception() is None or log.error("%s", done.exception())
        )
