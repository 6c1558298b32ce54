"""Connections to engines, and the checks that keep the fleet's picture of them fresh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime_proto import metadata
from vime_proto.channel import open_channel
from vime_proto.common.v1 import common_pb2, common_pb2_grpc
from vime_proto.errors import describe
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_router._fleet import Fleet
from vime_router._member import Member
from vime_router.settings import RouterSettings

log = logging.getLogger(__name__)
SERVICE = "vime.rollout.v1.RolloutService"


class Connection:
    """One engine's channel, its undecoded methods, and the task that watches it."""

    def __init__(self, channel: grpc.aio.Channel):
        self.channel = channel
        self.generate = channel.unary_stream(f"/{SERVICE}/Generate")
        self.unary = {name: channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Score", "GetModelInfo")}
        self.abort = rollout_pb2_grpc.RolloutServiceStub(channel).Abort
        self.info = common_pb2_grpc.InfoServiceStub(channel).GetInfo
        self.health = health_pb2_grpc.HealthStub(channel).Check
        self.status = rollout_pb2_grpc.EngineControlServiceStub(channel).GetStatus
        self.wake = asyncio.Event()
        self.idle = asyncio.Event()
        self.watch: asyncio.Task[None] | None = None


class Engines:
    """One connection per engine; also clears out engines that left.

    Args:
        fleet: told what checks find; its leavers are disconnected.
        settings: intervals, time-outs, and how engines are called.

    Attributes:
        credentials: call metadata that the engines ask for.
        hurry: whether requests wait for an engine.
    """

    def __init__(self, fleet: Fleet, settings: RouterSettings):
        self._fleet = fleet
        self._settings = settings
        token = Path(settings.engine_token_file).read_text().strip() if settings.engine_token_file else None
        # Added to each call here: an interceptor would cost more than the rest of a short call.
        self.credentials = ((metadata.AUTHORIZATION, f"Bearer {token}"),) if token else ()
        self._connections: dict[Member, Connection] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.hurry = lambda: False
        fleet.on_leave = self._on_leave

    def start(self) -> None:
        """Begins to clear out engines whose lease ran out."""
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep the fleet")

    def add(self, member: Member) -> None:
        """Connects to an engine and starts to watch it."""
        if member in self._connections:
            return
        tls = self._settings.engine_tls
        channel = open_channel(
            member.address,
            tls_ca=tls.ca,
            tls_certificate=tls.certificate,
            tls_key=tls.key,
            max_message_bytes=self._settings.server.max_message_mib << 20,
        )
        connection = self._connections[member] = Connection(channel)
        connection.watch = asyncio.create_task(self._watch(member, connection), name=f"watch {member.engine_id}")

    def of(self, member: Member) -> Connection | None:
        """The connection to an engine; None when it is closed."""
        return self._connections.get(member)

    def settled(self, member: Member) -> None:
        """Told when an engine that left the fleet has no request any more."""
        if member in self._connections:
            self._connections[member].idle.set()

    def check_soon(self, member: Member | None = None) -> None:
        """Asks for a check of one engine, or of all, now instead of at the next interval."""
        for one in self._connections if member is None else (member,):
            if one in self._connections:
                self._connections[one].wake.set()

    async def refresh(self) -> None:
        """Checks every engine now."""
        checks = [self.check(one) for one in list(self._fleet.members.values())]
        for result in await asyncio.gather(*checks, return_exceptions=True):
            # Closing the channel of an engine that leaves meanwhile cancels its check, or refuses it; whoever asked for a
            # refresh still wants the answer, and would get none at all if that cancellation were passed on.
            if isinstance(result, Exception) and not isinstance(result, grpc.aio.UsageError):
                raise result

    async def check(self, member: Member) -> bool:
        """Asks an engine for its health and status; answers whether it serves."""
        connection = self._connections.get(member)
        if connection is None:
            return False
        good = False
        before, status = member.obstacle(self._fleet.minimum_version), member.status
        messages = member.messages
        timeout = self._settings.health.timeout_seconds
        try:
            health = await connection.health(health_pb2.HealthCheckRequest(), timeout=timeout)
            if health.status == health_pb2.HealthCheckResponse.SERVING:
                answer = await connection.status(
                    rollout_pb2.GetStatusRequest(), timeout=timeout, metadata=self.credentials
                )
                # Before it is taken in, so that no request meets a life of it that we do not know.
                if member.draining or not member.healthy:
                    await self._see_incarnation(member, connection, timeout)
                member.saw_good(answer.status)
                good = True
            else:
                member.saw_refusal(f"health is {health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)}")
        except grpc.RpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            # An engine that is too busy to answer a check in time, but streams tokens, is alive.
            if not (late and member.messages > messages):
                member.saw_bad(describe(error))
        after = member.obstacle(self._fleet.minimum_version)
        if after != before:
            log.info("engine %s: %s", member.engine_id, after or "takes requests")
        # A waiting request may need a version of its own, so that a status matters even without the fleet's bound.
        if after != before or member.status != status:
            self._fleet.on_change()
        return good

    async def _see_incarnation(self, member: Member, connection: Connection, timeout: float) -> None:
        request = common_pb2.GetInfoRequest()
        try:
            info = await connection.info(request, timeout=timeout, metadata=self.credentials)
        except grpc.RpcError as error:
            # An engine need not have it; then only `undo` takes a drained one in again.
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        else:
            member.saw_incarnation(info.incarnation)

    async def close(self) -> None:
        """Leaves every engine."""
        tasks = [task for task in (self._sweeper, *self._leaving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in list(self._connections):
            await self._disconnect(member)

    async def _watch(self, member: Member, connection: Connection) -> None:
        health = self._settings.health
        while True:
            connection.wake.clear()
            await self.check(member)
            # While requests wait, an engine that comes back should get them soon; not sooner, whatever asks for checks.
            await asyncio.sleep(min(health.queued_interval_seconds, health.interval_seconds))
            if not self.hurry():
                rest = health.interval_seconds - health.queued_interval_seconds
                # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(rest, 0.0)):
                        await connection.wake.wait()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health.queued_interval_seconds)
            self._fleet.sweep()

    def _on_leave(self, member: Member, reason: str) -> None:
        log.warning("engine %s left the fleet: %s", member.engine_id, reason)
        task = asyncio.create_task(self._let_go(member), name=f"leave {member.engine_id}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self, member: Member) -> None:
        # An engine that only failed to renew its lease may finish what it has; a removed one may not.
        if not (member.gone or member.idle) and member in self._connections:
            await self._connections[member].idle.wait()
        await self._disconnect(member)

    async def _disconnect(self, member: Member) -> None:
        connection = self._connections.pop(member, None)
        if connection is not None:
            connection.watch.cancel()
            await asyncio.gather(connection.watch, return_exceptions=True)
            await connection.channel.close()
