"""The fake router's engines: registration, leases, health, choice."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import grpc

from vime_proto.channel import open_channel
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.common.v1 import common_pb2_grpc
from vime_proto.errors import StatusError
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.version import satisfies

_TAKES_REQUESTS = (
    rollout_pb2.ENGINE_STATE_SERVING,
    rollout_pb2.ENGINE_STATE_PAUSED,
    rollout_pb2.ENGINE_STATE_RECEIVING,
)


@dataclasses.dataclass
class Member:
    """One engine."""

    engine_id: str
    address: str
    labels: dict[str, str]
    expires: float | None
    channel: grpc.aio.Channel
    status: rollout_pb2.EngineStatus = dataclasses.field(default_factory=rollout_pb2.EngineStatus)
    draining: bool = False
    then_remove: bool = False
    reason: str = "not checked yet"
    outstanding: int = 0
    requests: int = 0
    failures: int = 0
    calls: set = dataclasses.field(default_factory=set)
    capabilities: dict[str, str] | None = None
    incarnation: str = ""

    @property
    def rollout(self) -> rollout_pb2_grpc.RolloutServiceStub:
        return rollout_pb2_grpc.RolloutServiceStub(self.channel)


class Fleet:
    """Engines by id; `changed` is notified whenever one becomes usable.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.members: dict[str, Member] = {}
        self.minimum: common.PolicyVersion | None = None
        self.changed = asyncio.Condition()
        self.queued = 0
        self.capabilities: dict[str, str] = {}
        self._clock = clock
        self._turn = 0

    async def register(self, request: pb.RegisterEngineRequest) -> Member:
        """Adds an engine, or renews it."""
        await self.drop_lapsed()
        known = self.members.get(request.engine_id)
        if known is not None and known.address != request.address:
            message = f"engine_id {request.engine_id!r} is registered at {known.address}, not {request.address}"
            raise StatusError(grpc.StatusCode.ALREADY_EXISTS, message)
        expires = self._clock() + request.lease_seconds if request.HasField("lease_seconds") else None
        if known is None:
            channel = open_channel(request.address)
            known = Member(request.engine_id, request.address, dict(request.labels), expires, channel)
            self.members[request.engine_id] = known
        known.expires, known.labels = expires, dict(request.labels)
        await self.check(known)
        return known

    def get(self, engine_id: str) -> Member:
        """The engine.

        Raises:
            StatusError: NOT_FOUND.
        """
        if engine_id not in self.members:
            valid = ", ".join(sorted(self.members)) or "none"
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"engine_id: no engine {engine_id!r}; registered: {valid}")
        return self.members[engine_id]

    async def remove(self, member: Member) -> None:
        """Removes an engine; its calls end."""
        self.members.pop(member.engine_id, None)
        for call in list(member.calls):
            call.cancel()
        await member.channel.close()

    async def drop_lapsed(self) -> None:
        """Removes engines whose lease ended, and drained ones that are idle."""
        for member in list(self.members.values()):
            lapsed = member.expires is not None and member.expires <= self._clock()
            if lapsed or (member.draining and member.then_remove and not member.outstanding):
                await self.remove(member)

    async def check(self, member: Member) -> None:
        """Asks an engine for its status."""
        stub = rollout_pb2_grpc.EngineControlServiceStub(member.channel)
        try:
            answer = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=2.0)
            await self._ask_info(member)
        except grpc.RpcError as error:
            member.reason = f"{error.code().name}: {error.details()}"
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # The channel was closed under the call: the engine was removed meanwhile.
            if self.members.get(member.engine_id) is member:
                raise
            return
        else:
            member.status, member.reason = answer.status, ""
        async with self.changed:
            self.changed.notify_all()

    async def _ask_info(self, member: Member) -> None:
        info = await common_pb2_grpc.InfoServiceStub(member.channel).GetInfo(common.GetInfoRequest(), timeout=2.0)
        if member.incarnation not in ("", info.incarnation):
            # Another life of it: draining meant the earlier one.
            member.draining = member.then_remove = False
        member.incarnation, member.capabilities = info.incarnation, dict(info.capabilities)
        known = [one.capabilities.items() for one in self.members.values() if one.capabilities is not None]
        self.capabilities.clear()
        # What one engine cannot do, the fleet cannot promise.
        self.capabilities.update(set.intersection(*map(set, known)) if known else ())

    async def check_all(self) -> None:
        """Asks every engine."""
        await self.drop_lapsed()
        await asyncio.gather(*(self.check(member) for member in list(self.members.values())))

    def health(self, member: Member) -> int:
        """How the router sees an engine."""
        if member.draining:
            return pb.ENGINE_HEALTH_DRAINING
        if member.reason:
            return pb.ENGINE_HEALTH_UNHEALTHY
        behind = self.minimum is not None and not satisfies(member.status.version, self.minimum)
        if behind or member.status.state not in _TAKES_REQUESTS:
            return pb.ENGINE_HEALTH_INELIGIBLE
        return pb.ENGINE_HEALTH_HEALTHY

    def entry(self, member: Member) -> pb.EngineEntry:
        """The engine as listed."""
        entry = pb.EngineEntry(
            engine_id=member.engine_id,
            address=member.address,
            health=self.health(member),
            status=member.status,
            outstanding_requests=member.outstanding,
            outstanding_tokens=0,
            requests_total=member.requests,
            failures_total=member.failures,
            reason=member.reason,
            labels=member.labels,
        )
        if member.expires is not None:
            entry.lease_seconds = max(0.0, member.expires - self._clock())
        return entry

    async def choose(self, prefer: str = "", avoid: frozenset[str] = frozenset()) -> Member:
        """The next usable engine in turn; waits until there is one."""
        self.queued += 1
        try:
            while True:
                usable = [m for m in self.members.values() if self.health(m) == pb.ENGINE_HEALTH_HEALTHY]
                fresh = [m for m in usable if m.engine_id not in avoid] or usable
                if fresh:
                    self._turn += 1
                    return next((m for m in fresh if m.engine_id == prefer), fresh[self._turn % len(fresh)])
                async with self.changed:
                    await self.changed.wait()
        finally:
            self.queued -= 1
