"""Weights that the trainer published while this engine was away: fetched before it serves, and whenever an update went by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from vime_proto.channel import call, open_channel
from vime_proto.engine_state import SERVING, STALE
from vime_proto.errors import ContractError, StatusError, describe
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.version import show
from vime_proto.weights.v1 import weights_pb2 as weights
from vime_proto.weights.v1 import weights_pb2_grpc
from vime_rollout.engine._control_service import ControlServicer
from vime_rollout.engine._engine import Engine

log = logging.getLogger(__name__)

_TRANSPORT = "catch-up"
_FIRST_PAUSE, _LARGEST_PAUSE = 0.5, 15.0
# Answers that no waiting changes: the address is of something else, or of another run.
_FINAL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


class CatchUp:
    """Reads a trainer's WeightService and drives this engine's own update with what it finds.

    A trainer pushes each version to the engines that it can reach; what is fetched here is what such a push left out. So an
    engine that holds the newest version, or that is receiving one, is left alone.
    """

    def __init__(self, engine: Engine, control: ControlServicer):
        settings = engine.settings
        self._engine = engine
        self._control = control
        self._address = settings.weights
        self._token = Path(settings.weights_token_file).read_text().strip() if settings.weights_token_file else None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._task: asyncio.Task | None = None

    async def first(self) -> None:
        """Brings the engine to the newest version, before it serves. A trainer that is not there yet is left to ``start``.

        Raises:
            ContractError: the address answers, but trains another run or nothing.
        """
        settings = self._engine.settings
        request = weights.GetLatestManifestRequest(run_id=settings.run_id)
        try:
            stub, seconds = self._stub(self._address), settings.weights_seconds
            answer = await call(stub.GetLatestManifest, request, timeout=seconds)
        except grpc.RpcError as error:
            if error.code() in _FINAL:
                raise ContractError("weights", f"{self._address}: {describe(error)}") from None
            log.warning("no weights from %s yet: %s", self._address, describe(error))
            return
        if answer.HasField("manifest"):
            try:
                await self._bring(answer.manifest)
            except (ContractError, StatusError, grpc.RpcError) as error:
                log.warning("not caught up with %s yet: %s", show(answer.manifest.version), _reason(error))

    def start(self) -> None:
        """Goes on in the background: each version that is published and does not arrive here by itself is fetched."""
        self._task = asyncio.ensure_future(self._follow())

    async def stop(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for channel in self._channels.values():
            await channel.close()

    async def _follow(self) -> None:
        pause, said = _FIRST_PAUSE, ""
        while True:
            try:
                request = weights.WatchManifestsRequest(run_id=self._engine.settings.run_id)
                async for answer in self._stub(self._address).WatchManifests(request):
                    await self._bring(answer.manifest)
                    pause, said = _FIRST_PAUSE, ""
                reason = "the trainer ended the stream"
            except (ContractError, StatusError, grpc.RpcError) as error:
                reason = _reason(error)
            except Exception as error:
                # A backend that failed, say: the engine goes on with what it holds, and the next try may work.
                log.exception("weights of %s", self._address)
                reason = repr(error)
            if reason != said:
                log.info("weights of %s: %s; tried again", self._address, reason)
            said = reason
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LARGEST_PAUSE)

    async def _bring(self, manifest: weights.WeightManifest) -> None:
        engine = self._engine
        while self._lacks(manifest):
            if engine.machine.state in (SERVING, STALE):
                await self._fetch(manifest)
                return
            # It is receiving (these weights, most likely), paused or asleep: whoever did that goes first.
            await engine.wait_changed()

    def _lacks(self, manifest: weights.WeightManifest) -> bool:
        held, wanted = self._engine.machine.version, manifest.version
        return held is None or (held.lineage, held.number) < (wanted.lineage, wanted.number)

    async def _fetch(self, manifest: weights.WeightManifest) -> None:
        engine, control = self._engine, self._control
        prefix = f"{manifest.update_id}/{_TRANSPORT}/{uuid.uuid4().hex}"
        own = weights.WeightManifest()
        own.CopyFrom(manifest)
        for source in own.sources:
            # As the trainer pushes it: the same update, however it arrives.
            source.endpoint = ""
        config = weights.TransportConfig(transport_id=_TRANSPORT, stream=weights.StreamTransport())
        await control.InitTransport(pb.InitTransportRequest(request_id=f"{prefix}/init", config=config), None)
        begin = pb.BeginUpdateRequest(request_id=f"{prefix}/begin", manifest=own, transport_id=_TRANSPORT)
        await control.BeginUpdate(begin, None)
        update = control.open_update
        try:
            for source in manifest.sources:
                if source.chunks:
                    await control.SendChunks(self._parts(manifest.update_id, source), None)
            totals = [
                weights.SourceTotal(source_id=one.source_id, chunks=len(one.chunks), bytes=one.total_bytes)
                for one in manifest.sources
            ]
            commit = pb.CommitUpdateRequest(request_id=f"{prefix}/commit", update_id=manifest.update_id, totals=totals)
            await control.CommitUpdate(commit, None)
        except BaseException as error:
            # The trainer may have put an update of its own in the place of this one.
            if update is not None and control.open_update is update:
                abort = pb.AbortUpdateRequest(
                    request_id=f"{prefix}/abort", update_id=manifest.update_id, reason=f"not fetched: {error}"
                )
                with contextlib.suppress(StatusError):
                    await control.AbortUpdate(abort, None)
            raise
        log.info("caught up with %s, fetched from %s", show(manifest.version), self._address)
        ack = weights.AckAppliedRequest(
            request_id=f"{prefix}/ack", update_id=manifest.update_id, engine_id=engine.settings.engine_id
        )
        try:
            await call(self._stub(self._address).AckApplied, ack, timeout=10.0)
        except grpc.RpcError as error:
            # The weights are in place all the same.
            log.warning("%s does not know that %s holds the weights: %s", self._address, ack.engine_id, describe(error))

    async def _parts(self, update_id: str, source: weights.WeightSource) -> AsyncIterator[pb.SendChunksRequest]:
        request = weights.FetchTensorsRequest(update_id=update_id, source_id=source.source_id)
        async for part in self._stub(source.endpoint or self._address).FetchTensors(request):
            yield pb.SendChunksRequest(
                update_id=update_id,
                source_id=source.source_id,
                chunk=part.chunk if part.HasField("chunk") else None,
                offset=part.offset if part.HasField("offset") else None,
                data=part.data,
            )

    def _stub(self, address: str) -> weights_pb2_grpc.WeightServiceStub:
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, token=self._token, tls_ca=self._engine.settings.weights_tls_ca
            )
        return weights_pb2_grpc.WeightServiceStub(self._channels[address])


def _reason(error: Exception) -> str:
    return describe(error) if isinstance(error, grpc.RpcError) else str(error)
