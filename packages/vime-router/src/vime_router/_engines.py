"""Connections to engines, and the checks that keep the fleet's picture of them fresh."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime_proto.channel import open_channel
from vime_proto.errors import describe
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_router._fleet import Fleet
from vime_router._member import Member
from vime_router.settings import RouterSettings

log = logging.getLogger(__name__)


class Engines:
    """One channel and one watching task per engine."""

    def __init__(self, fleet: Fleet, settings: RouterSettings):
        self._fleet = fleet
        self._settings = settings
        self._token = Path(settings.engine_token_file).read_text().strip() if settings.engine_token_file else None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._watches: dict[str, asyncio.Task] = {}
        self._wakes: dict[str, asyncio.Event] = {}

    def add(self, member: Member) -> None:
        """Connects to an engine and starts to watch it."""
        if member.engine_id in self._watches:
            return
        self._channels[member.engine_id] = open_channel(member.address, token=self._token)
        self._wakes[member.engine_id] = asyncio.Event()
        self._watches[member.engine_id] = asyncio.create_task(self._watch(member), name=f"watch {member.engine_id}")

    def channel(self, engine_id: str) -> grpc.aio.Channel:
        """The connection to an engine."""
        return self._channels[engine_id]

    async def remove(self, engine_id: str) -> None:
        """Stops watching an engine and closes its connection, which ends its calls."""
        watch = self._watches.pop(engine_id, None)
        self._wakes.pop(engine_id, None)
        if watch is not None:
            watch.cancel()
            await self._channels.pop(engine_id).close()

    async def close(self) -> None:
        """Leaves every engine."""
        for engine_id in list(self._watches):
            await self.remove(engine_id)

    def check_soon(self, engine_id: str) -> None:
        """Asks for a check now instead of at the next interval."""
        if engine_id in self._wakes:
            self._wakes[engine_id].set()

    async def refresh(self) -> None:
        """Checks every engine now."""
        await asyncio.gather(*(self._check(one) for one in list(self._fleet.members.values())))

    async def _watch(self, member: Member) -> None:
        wake = self._wakes[member.engine_id]
        while True:
            await self._check(member)
            try:
                await asyncio.wait_for(wake.wait(), self._settings.health.interval_seconds)
            except TimeoutError:
                pass
            wake.clear()
            for engine_id in self._fleet.drop_expired():
                log.warning("engine %s left the fleet: its lease ran out or it was drained", engine_id)
                await self.remove(engine_id)

    async def _check(self, member: Member) -> None:
        channel = self._channels.get(member.engine_id)
        if channel is None:
            return
        before = member.obstacle(self._fleet.minimum_version)
        timeout = self._settings.health.timeout_seconds
        try:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
            if health.status == health_pb2.HealthCheckResponse.SERVING:
                control = rollout_pb2_grpc.EngineControlServiceStub(channel)
                answer = await control.GetStatus(rollout_pb2.GetStatusRequest(), timeout=timeout)
                member.saw_good(answer.status)
            else:
                member.saw_bad(f"health is {health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)}")
        except grpc.RpcError as error:
            member.saw_bad(describe(error))
        if member.obstacle(self._fleet.minimum_version) != before:
            self._fleet.touch()
