"""EngineControlService of the fake engine: the pure state machines, with requests to quiesce and bytes to read."""

from __future__ import annotations

import asyncio

import grpc

from vime_proto.engine_state import PAUSED, RECEIVING, SERVING
from vime_proto.errors import ContractError, StatusError
from vime_proto.fakes import _toy_model as toy
from vime_proto.fakes._weight_files import read_chunk, root_of
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.update_state import ChunkAssembler, UpdateReceiver
from vime_proto.validate import validate_in_flight, validate_transport

TRANSPORTS = ("file", "shm", "stream")


class ControlMixin:
    """The service's methods; the engine provides model, machine and requests."""

    def status(self) -> pb.EngineStatus:
        """The status now."""
        running = len([one for one in self.generations.open if one.stepping])
        status = pb.EngineStatus(
            engine_id=self.engine_id, running=running, waiting=self.generations.waiting, transports=TRANSPORTS
        )
        status.layout.tensor_parallel = status.layout.pipeline_parallel = 1
        status.layout.data_parallel = status.layout.expert_parallel = 1
        return self.machine.fill(status)

    async def _once(self, request, function):
        async def execute():
            async with self.control:
                return await function(request)

        return await self.log.run(request.request_id, request, execute)

    async def _changed(self) -> None:
        self.frozen = self.frozen and self.machine.state != SERVING
        async with self.state_changed:
            self.state_changed.notify_all()

    async def _quiesce(self, request) -> list[str]:
        """SERVING -> PAUSED: afterwards no step runs. Answers the requests that were ended."""
        policy = validate_in_flight(request)
        if self.machine.state != SERVING:
            return []
        self.machine.pause()
        aborted: list[str] = []
        busy = lambda: self.busy  # noqa: E731
        if policy == pb.IN_FLIGHT_POLICY_KEEP:
            self.frozen = True
        else:
            busy = lambda: [one for one in self.generations.open if one.stepping]  # noqa: E731
        if policy == pb.IN_FLIGHT_POLICY_ABORT:
            aborted = await self.abort_requests(admitted_only=True)
        try:
            limit = request.wait_seconds if policy == pb.IN_FLIGHT_POLICY_WAIT else None
            async with asyncio.timeout(limit):
                async with self.state_changed:
                    await self.state_changed.wait_for(lambda: not busy())
        except TimeoutError:
            running = len(busy())
            self.machine.resume()
            await self._changed()
            message = f"in_flight: {running} requests still ran after {request.wait_seconds:g} s; the engine serves on"
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
        return aborted

    async def GetStatus(self, request, context):
        return pb.GetStatusResponse(status=self.status())

    async def Pause(self, request, context):
        return await self._once(request, self._pause)

    async def _pause(self, request):
        validate_in_flight(request)
        if self.machine.state not in (SERVING, PAUSED):
            self.machine.pause()
        aborted = await self._quiesce(request)
        return pb.PauseResponse(status=self.status(), aborted=aborted)

    async def Resume(self, request, context):
        return await self._once(request, self._resume)

    async def _resume(self, request):
        self.machine.resume()
        await self._changed()
        return pb.ResumeResponse(status=self.status())

    async def Sleep(self, request, context):
        return await self._once(request, self._sleep)

    async def _sleep(self, request):
        self.machine.check_sleep(request.level)
        await self._quiesce(request)
        self.machine.sleep(request.level, busy=self.busy)
        await self._changed()
        return pb.SleepResponse(status=self.status())

    async def Wake(self, request, context):
        return await self._once(request, self._wake)

    async def _wake(self, request):
        self.machine.wake(weights=request.weights, kv_cache=request.kv_cache)
        await self._changed()
        return pb.WakeResponse(status=self.status())

    async def InitTransport(self, request, context):
        return await self._once(request, self._init_transport)

    async def _init_transport(self, request):
        kind = validate_transport(request.config, TRANSPORTS)
        if kind != "stream":
            root_of(request.config)
        known = self.transports.get(request.config.transport_id)
        if known is not None and known != request.config:
            raise StatusError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"transport_id {request.config.transport_id!r} exists with another configuration",
            )
        self.transports[request.config.transport_id] = request.config
        return pb.InitTransportResponse()

    async def DestroyTransport(self, request, context):
        return await self._once(request, self._destroy_transport)

    async def _destroy_transport(self, request):
        self._transport(request.transport_id)
        if self.machine.state == RECEIVING and self.update_transport.transport_id == request.transport_id:
            message = f"transport {request.transport_id!r} is used by update {self.machine.update_id!r}"
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, message)
        del self.transports[request.transport_id]
        return pb.DestroyTransportResponse()

    def _transport(self, transport_id: str):
        if transport_id not in self.transports:
            known = ", ".join(self.transports) or "none"
            raise StatusError(
                grpc.StatusCode.NOT_FOUND, f"transport_id: no transport {transport_id!r}; set up: {known}"
            )
        return self.transports[transport_id]

    async def BeginUpdate(self, request, context):
        return await self._once(request, self._begin)

    async def _begin(self, request):
        machine, manifest = self.machine, request.manifest
        seconds = request.deadline_seconds if request.HasField("deadline_seconds") else 600.0
        update = UpdateReceiver(manifest, toy.EXPECTED, machine.version, toy.DIGEST, seconds)
        transport = self._transport(request.transport_id)
        machine.check_begin_update(manifest.update_id, full=update.full)
        came_from = machine.state
        aborted = await self._quiesce(request)
        machine.begin_update(manifest.update_id, full=update.full, busy=self.busy, return_to=came_from)
        self.update, self.update_transport = update, transport
        self.watch = asyncio.create_task(self._end_at_deadline(update))
        await self._changed()
        return pb.BeginUpdateResponse(status=self.status(), aborted=aborted)

    async def _end_at_deadline(self, update: UpdateReceiver) -> None:
        await asyncio.sleep(update.seconds_left)
        async with self.control:
            if self.update is update:
                await self._fail("the deadline passed")

    async def _fail(self, reason: str) -> None:
        self.machine.fail_update(self.machine.update_id, reason)
        await self._end_update()

    async def _end_update(self) -> None:
        self.update = self.update_transport = None
        if self.watch is not None and self.watch is not asyncio.current_task():
            self.watch.cancel()
        self.watch = None
        await self._changed()

    def _open_update(self, update_id: str, kinds: tuple[str, ...]) -> UpdateReceiver:
        self.machine.check_update(update_id)
        kind = self.update_transport.WhichOneof("transport")
        if kind not in kinds:
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION, f"update {update_id!r} travels by {kind}, not by this call"
            )
        return self.update

    async def _load(self, update: UpdateReceiver, source_id: str, index: int, data: bytes) -> int:
        try:
            update.check_chunk(source_id, index, data)
        except StatusError as error:
            await self._fail(error.message)
            raise
        self.machine.first_byte()
        chunk = update.check_load(source_id, [index])[0]
        self.model.load(update.manifest, source_id, chunk.bytes.offset, data)
        update.chunk_loaded(source_id, index)
        await self._changed()
        return len(data)

    async def LoadChunks(self, request, context):
        return await self._once(request, self._load_chunks)

    async def _load_chunks(self, request):
        update = self._open_update(request.update_id, ("file", "shm"))
        began, loaded = update.seconds, 0
        update.check_load(request.source_id, request.chunks)
        for index in request.chunks:
            data = read_chunk(root_of(self.update_transport), request.update_id, request.source_id, index)
            loaded += await self._load(update, request.source_id, index, data)
        return pb.LoadChunksResponse(bytes=loaded, seconds=update.seconds - began)

    async def SendChunks(self, requests, context):
        assemblers: dict[str, ChunkAssembler] = {}
        update, began, loaded = None, 0.0, 0
        async for request in requests:
            async with self.control:
                current = self._open_update(request.update_id, ("stream",))
                if update is None:
                    update, began = current, current.seconds
                if not (request.HasField("chunk") and request.HasField("offset")):
                    raise ContractError("chunk", "chunk and offset must be set; 0 is a value")
                source = assemblers.setdefault(request.source_id, ChunkAssembler(current, request.source_id))
                data = source.add(request.chunk, request.offset, request.data)
                if data is not None:
                    loaded += await self._load(current, request.source_id, request.chunk, data)
        for source in assemblers.values():
            source.end()
        return pb.SendChunksResponse(bytes=loaded, seconds=update.seconds - began if update else 0.0)

    async def CommitUpdate(self, request, context):
        return await self.log.run(request.request_id, request, lambda: self._commit(request))

    async def _commit(self, request):
        async with self.control:
            update = self._open_update(request.update_id, TRANSPORTS)
            update.check_totals(request.totals)
        async with self.state_changed:
            await self.state_changed.wait_for(lambda: update.complete or self.update is not update)
        async with self.control:
            self.machine.check_update(request.update_id)
            try:
                update.check_checksums(request.totals)
            except StatusError as error:
                await self._fail(error.message)
                raise
            self.machine.commit_update(request.update_id, update.manifest.version, stay_paused=request.stay_paused)
            self.last_version = update.manifest.version
            seconds = update.seconds
            await self._end_update()
            return pb.CommitUpdateResponse(status=self.status(), bytes=update.bytes_loaded, seconds=seconds)

    async def AbortUpdate(self, request, context):
        return await self._once(request, self._abort_update)

    async def _abort_update(self, request):
        self.machine.check_update(request.update_id)
        await self._fail(request.reason or "aborted")
        return pb.AbortUpdateResponse(status=self.status())
