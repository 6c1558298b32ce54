"""Tells a router about the engine, for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from pathlib import Path

import grpc

from vime_proto.channel import open_channel
from vime_proto.errors import describe
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc
from vime_rollout.engine._settings import EngineSettings

log = logging.getLogger(__name__)


class Registration:
    """Registers, renews the lease at a third of it, and deregisters. A router that is away is tried again."""

    def __init__(self, settings: EngineSettings, address: str):
        token = Path(settings.router_token_file).read_text().strip() if settings.router_token_file else None
        self._settings = settings
        self._address = settings.advertise or address
        self._channel = open_channel(settings.router, token=token, tls_ca=settings.router_tls_ca)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._task: asyncio.Task | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Begins to register."""
        self._task = asyncio.ensure_future(self._renew())

    async def stop(self) -> None:
        """Deregisters."""
        if self._task is not None:
            # A call on its way gets a moment: cut off, it could still arrive after the one that takes the engine off.
            self._stopping.set()
            await asyncio.wait([self._task], timeout=1.0)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            request = pb.DeregisterEngineRequest(request_id=uuid.uuid4().hex, engine_id=self._settings.engine_id)
            try:
                await self._stub.DeregisterEngine(request, timeout=1.0)
            except grpc.RpcError as error:
                log.info("not deregistered: %s", describe(error))
        await self._channel.close()

    async def _renew(self) -> None:
        period = self._settings.lease_seconds / 3
        complained = False
        while not self._stopping.is_set():
            request = pb.RegisterEngineRequest(
                request_id=uuid.uuid4().hex,
                engine_id=self._settings.engine_id,
                address=self._address,
                lease_seconds=self._settings.lease_seconds,
                labels=self._settings.labels,
            )
            try:
                await self._stub.RegisterEngine(request, timeout=max(period, 1.0))
                complained = False
            except grpc.RpcError as error:
                if not complained:
                    log.warning("router %s does not register this engine: %s", self._settings.router, describe(error))
                complained = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), period)
