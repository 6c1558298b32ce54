"""One engine's part of a weight update, from InitTransport to Commit or Abort."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator

import grpc

from vime_proto.channel import LOST
from vime_proto.errors import describe
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.weights.v1 import weights_pb2
from vime_trainer.settings.weights import WeightsSettings

from ._store import ChunkStore

log = logging.getLogger(__name__)

IN_FLIGHT = {
    "abort": pb.IN_FLIGHT_POLICY_ABORT,
    "keep": pb.IN_FLIGHT_POLICY_KEEP,
    "wait": pb.IN_FLIGHT_POLICY_WAIT,
}
_PASSING = (*LOST, grpc.StatusCode.RESOURCE_EXHAUSTED)
_CLEANING = (*_PASSING, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
_CLEANING_TIMEOUT = 30.0
_LOST_TIMEOUT = 5.0


class EngineUpdate:
    """Drives one engine through one update. Every call has a time-out, and is repeated under the same request id."""

    def __init__(
        self,
        engine_id: str,
        stub: rollout_pb2_grpc.EngineControlServiceStub,
        manifest: weights_pb2.WeightManifest,
        transport: weights_pb2.TransportConfig,
        store: ChunkStore,
        settings: WeightsSettings,
        attempt: int,
    ):
        self.engine_id = engine_id
        self._stub = stub
        self._manifest = manifest
        self._transport = transport
        self._store = store
        self._settings = settings
        self._first_attempt = attempt == 1
        self._prefix = f"{manifest.update_id}/{engine_id}/{attempt}"
        self._lost = False  # it was tried for the whole time that the settings allow, in vain

    async def prepare(self) -> None:
        """Begins the update and loads every chunk; the engine still has its old version afterwards.

        Raises:
            grpc.RpcError: the engine refused, or could not be reached.
        """
        settings, update_id = self._settings, self._manifest.update_id
        await self._end_left_behind()
        init = pb.InitTransportRequest(request_id=f"{self._prefix}/init", config=self._transport)
        await self._call(self._stub.InitTransport, init)
        begin = pb.BeginUpdateRequest(
            request_id=f"{self._prefix}/begin",
            manifest=self._manifest,
            transport_id=self._transport.transport_id,
            in_flight=IN_FLIGHT[settings.in_flight],
            deadline_seconds=settings.timeout_seconds,
        )
        if settings.in_flight == "wait":
            begin.wait_seconds = settings.wait_seconds
        await self._call(self._stub.BeginUpdate, begin)
        for source in self._manifest.sources:
            for chunk in source.chunks:
                if self._transport.WhichOneof("transport") == "stream":
                    await self._stub.SendChunks(
                        self._parts(source.source_id, chunk.index), timeout=settings.timeout_seconds
                    )
                else:
                    load = pb.LoadChunksRequest(
                        request_id=f"{self._prefix}/load/{source.source_id}/{chunk.index}",
                        update_id=update_id,
                        source_id=source.source_id,
                        chunks=[chunk.index],
                    )
                    await self._call(self._stub.LoadChunks, load)

    async def _end_left_behind(self) -> None:
        """A trainer that was killed in an update left it open; nobody else sends weights of its run.

        The very same update goes on where it is: its calls have the same request ids.
        """
        status = (await self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout=_CLEANING_TIMEOUT)).status
        same = status.update_id == self._manifest.update_id and self._first_attempt
        if status.update_id.startswith(f"{self._manifest.version.run_id}-") and not same:
            abort = pb.AbortUpdateRequest(
                request_id=f"{self._prefix}/left-behind",
                update_id=status.update_id,
                reason=f"left behind; update {self._manifest.update_id} begins",
            )
            await self._call(self._stub.AbortUpdate, abort, _CLEANING, _CLEANING_TIMEOUT)

    async def commit(self) -> None:
        """Makes the new version live.

        Raises:
            grpc.RpcError: the engine refused, or does not say that it has the version.
        """
        totals = [
            weights_pb2.SourceTotal(source_id=s.source_id, chunks=len(s.chunks), bytes=s.total_bytes)
            for s in self._manifest.sources
        ]
        request = pb.CommitUpdateRequest(
            request_id=f"{self._prefix}/commit", update_id=self._manifest.update_id, totals=totals
        )
        try:
            await self._call(self._stub.CommitUpdate, request)
        except grpc.RpcError:
            # The answer may be lost although the commit happened: the version tells.
            if not await self._has_version():
                raise
        else:
            # An engine answers a repeated request without doing anything, whatever it runs by now.
            if not await self._has_version():
                raise RuntimeError("it does not have the version, although it committed the update")

    async def abort(self, reason: str) -> None:
        """Gives the update up and lets the engine generate again, as far as it can be reached. Never raises.

        An engine that could not be reached is called once more, and no further: training waits for this.
        """
        state = None
        try:
            request = pb.AbortUpdateRequest(
                request_id=f"{self._prefix}/abort", update_id=self._manifest.update_id, reason=reason
            )
            answer = await self._call(self._stub.AbortUpdate, request, _CLEANING, _CLEANING_TIMEOUT)
            state = answer.status.state
        except grpc.RpcError as error:
            log.info("engine %s: abort of update %s: %s", self.engine_id, request.update_id, describe(error))
            if self._lost:
                return
        if state in (None, pb.ENGINE_STATE_PAUSED):
            try:
                resume = pb.ResumeRequest(request_id=f"{self._prefix}/resume")
                await self._call(self._stub.Resume, resume, _CLEANING, _CLEANING_TIMEOUT)
            except grpc.RpcError as error:
                log.info("engine %s: resume: %s", self.engine_id, describe(error))

    async def _has_version(self) -> bool:
        try:
            answer = await self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout=_CLEANING_TIMEOUT)
        except grpc.RpcError:
            return False
        return answer.status.version == self._manifest.version

    async def _parts(self, source_id: str, index: int) -> AsyncIterator[pb.SendChunksRequest]:
        for offset, data in self._store.read(self._manifest.update_id, source_id, index, self._settings.part_bytes):
            yield pb.SendChunksRequest(
                update_id=self._manifest.update_id, source_id=source_id, chunk=index, offset=offset, data=data
            )

    async def _call(self, method, request, repeat=_PASSING, timeout: float | None = None):
        timeout = self._settings.timeout_seconds if timeout is None else timeout
        if self._lost:
            timeout = min(timeout, _LOST_TIMEOUT)
        end = time.monotonic() + (0.0 if self._lost else self._settings.retry_seconds)
        backoff = 0.05
        while True:
            try:
                return await method(request, timeout=timeout)
            except grpc.RpcError as error:
                if error.code() not in repeat or time.monotonic() + backoff >= end:
                    self._lost = error.code() in LOST
                    raise
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, 2.0)
