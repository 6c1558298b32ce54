"""``EngineControlService`` of the engine."""

from __future__ import annotations

import asyncio

import grpc

from vime_proto.engine_state import PAUSED, SERVING
from vime_proto.errors import ContractError, StatusError, nearest
from vime_proto.idempotency import RequestLog
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.update_state import ChunkAssembler
from vime_proto.validate import validate_in_flight
from vime_rollout.engine._engine import Engine
from vime_rollout.engine._transports import Transport, anonymous, make_transport
from vime_rollout.engine._updates import Update, Updates


class ControlServicer(rollout_pb2_grpc.EngineControlServiceServicer):
    """State and weights. One change at a time; a repeated request id gets the first answer."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = asyncio.Lock()
        self._updates = Updates(engine, self._lock)
        self._log = RequestLog()
        self._transports: dict[str, Transport] = {}
        self._frozen = False  # what is in flight takes no steps

    @property
    def open_update(self) -> Update | None:
        """The update that is open now."""
        return self._updates.open

    async def GetStatus(self, request, context):
        return pb.GetStatusResponse(status=self._engine.status())

    # Pause and sleep ------------------------------------------------------------------------------------------

    async def Pause(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._pause(request))

    async def _pause(self, request):
        policy = validate_in_flight(request)
        async with self._lock:
            before = self._engine.machine.state
            self._engine.machine.pause()
            aborted = await self._stop(policy, request.wait_seconds, before)
            return pb.PauseResponse(status=self._engine.status(), aborted=aborted)

    async def Resume(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._resume())

    async def _resume(self):
        async with self._lock:
            machine = self._engine.machine
            if machine.state == PAUSED:
                await self._engine.backend.resume()
            machine.resume()
            self._frozen = False
            self._engine.changed()
            return pb.ResumeResponse(status=self._engine.status())

    async def Sleep(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._sleep(request))

    async def _sleep(self, request):
        policy = validate_in_flight(request)
        async with self._lock:
            machine = self._engine.machine
            machine.check_sleep(request.level)
            before = machine.state
            if before in (SERVING, PAUSED):
                machine.pause()
                await self._stop(policy, request.wait_seconds, before)
                machine.sleep(request.level, busy=self._busy)
                await self._engine.backend.sleep(request.level, keep=policy == pb.IN_FLIGHT_POLICY_KEEP)
            self._engine.changed()
            return pb.SleepResponse(status=self._engine.status())

    async def Wake(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._wake(request))

    async def _wake(self, request):
        async with self._lock:
            engine = self._engine
            before = engine.machine.state
            engine.machine.wake(weights=request.weights, kv_cache=request.kv_cache)
            if before != engine.machine.state:
                tags = [
                    name for name, wanted in (("weights", request.weights), ("kv_cache", request.kv_cache)) if wanted
                ]
                await engine.backend.wake(tags)
                if engine.machine.state == PAUSED:
                    await engine.backend.pause(keep=True)
            engine.changed()
            return pb.WakeResponse(status=engine.status())

    @property
    def _busy(self) -> int:
        """Requests that may be taking a step."""
        return 0 if self._frozen else self._engine.backend.unfinished

    async def _stop(self, policy: int, wait_seconds: float, before: int) -> list[str]:
        """Ends, freezes or awaits what is in flight; ids of those ended. The machine is PAUSED, so nothing new begins."""
        engine = self._engine
        running = [one for one in engine.registry.running if one.internal_id is not None]
        if policy == pb.IN_FLIGHT_POLICY_WAIT and not await engine.idle(wait_seconds):
            if before == SERVING:
                engine.machine.resume()
                engine.changed()
            raise StatusError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"wait_seconds: {engine.backend.unfinished} requests still run after {wait_seconds:g} s",
            )
        keep = policy == pb.IN_FLIGHT_POLICY_KEEP
        await engine.backend.pause(keep=keep)
        self._frozen = keep
        if keep:
            return []
        # Those on their way to the backend when it paused.
        await engine.end_requests(one for one in running if not one.done)
        return [one.request_id for one in running if one.finish == "abort"]

    # Transports -----------------------------------------------------------------------------------------------

    async def InitTransport(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._init_transport(request))

    async def _init_transport(self, request):
        settings, config = self._engine.settings, request.config
        transport = make_transport(config, self._engine.transports, settings.file_root, settings.shm_root)
        known = self._transports.get(config.transport_id)
        if known is not None and known.config != config:
            raise StatusError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"transport {config.transport_id!r} exists with another configuration; destroy it first",
            )
        self._transports.setdefault(config.transport_id, transport)
        return pb.InitTransportResponse()

    async def DestroyTransport(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._destroy_transport(request))

    async def _destroy_transport(self, request):
        transport = self._transport(request.transport_id)
        if self._updates.open is not None and self._updates.open.transport is transport:
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"transport {request.transport_id!r} is in use by update {self._updates.open.manifest.update_id!r}",
            )
        del self._transports[request.transport_id]
        return pb.DestroyTransportResponse()

    def _transport(self, transport_id: str) -> Transport:
        if transport_id not in self._transports:
            raise StatusError(
                grpc.StatusCode.NOT_FOUND, f"transport_id: {nearest(transport_id, self._transports, 'transport')}"
            )
        return self._transports[transport_id]

    # Weight update --------------------------------------------------------------------------------------------

    async def BeginUpdate(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._begin(request))

    async def _begin(self, request):
        policy = validate_in_flight(request)
        engine = self._engine
        async with self._lock:
            update = self._updates.check_begin(request, self._transport(request.transport_id))
            aborted: list[str] = []
            if update is not None:
                before = engine.machine.state
                if before == SERVING:
                    engine.machine.pause()
                    aborted = await self._stop(policy, request.wait_seconds, before)
                try:
                    await self._updates.begin(update, before, self._busy)
                except StatusError:
                    if before == SERVING and engine.machine.state == PAUSED:
                        await engine.backend.resume()
                        engine.machine.resume()
                        engine.changed()
                    raise
            return pb.BeginUpdateResponse(status=engine.status(), aborted=aborted)

    async def LoadChunks(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._load(request))

    async def _load(self, request):
        clock = asyncio.get_running_loop().time
        began, loaded = clock(), 0
        async with self._lock:
            update = self._updates.current(request.update_id)
            if update is not None:
                for chunk in update.receiver.check_load(request.source_id, list(request.chunks)):
                    with update.transport.open(request.update_id, request.source_id, chunk.index) as data:
                        await self._updates.load(update, request.source_id, chunk.index, data)
                    loaded += chunk.bytes.length
        return pb.LoadChunksResponse(bytes=loaded, seconds=clock() - began)

    async def SendChunks(self, request_iterator, context):
        clock = asyncio.get_running_loop().time
        began, loaded = clock(), 0
        update = assembler = source_id = None
        async for part in request_iterator:
            if update is None:
                update = self._updates.current(part.update_id)
                if update is None:
                    return pb.SendChunksResponse(bytes=0, seconds=0.0)
                if update.transport.kind != "stream":
                    raise StatusError(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"update {part.update_id!r} comes by {update.transport.kind}: name its chunks with LoadChunks",
                    )
                source_id, assembler = part.source_id, ChunkAssembler(update.receiver, part.source_id)
            if part.update_id != update.manifest.update_id or part.source_id != source_id:
                raise ContractError("source_id", "a call sends chunks of one source of one update")
            for name in ("chunk", "offset"):
                if not part.HasField(name):
                    raise ContractError(
                        name, f"must be set; 0 is a value (update {part.update_id!r}, source {source_id!r})"
                    )
            whole = assembler.add(part.chunk, part.offset, part.data)
            if whole is not None:
                async with self._lock:
                    self._updates.current(part.update_id)
                    with anonymous(whole) as data:
                        await self._updates.load(update, source_id, part.chunk, data)
                loaded += len(whole)
        if assembler is not None:
            assembler.end()
        return pb.SendChunksResponse(bytes=loaded, seconds=clock() - began)

    async def CommitUpdate(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._commit(request))

    async def _commit(self, request):
        update = self._updates.current(request.update_id)
        if update is not None:
            update.receiver.check_totals(request.totals)
            await self._updates.wait_complete(update)
            async with self._lock:
                if self._updates.open is update:
                    await self._updates.commit(update, request.totals, request.stay_paused)
        async with self._lock:
            if self._updates.current(request.update_id) is not None:
                raise StatusError(grpc.StatusCode.ABORTED, f"update {request.update_id!r} began anew")
            return self._updates.committed()

    async def AbortUpdate(self, request, context):
        return await self._log.run(request.request_id, request, lambda: self._abort(request))

    async def _abort(self, request):
        async with self._lock:
            if self._updates.current(request.update_id) is None:
                raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"update {request.update_id!r} is committed")
            await self._updates.fail(request.reason or "aborted by the sender")
            return pb.AbortUpdateResponse(status=self._engine.status())
