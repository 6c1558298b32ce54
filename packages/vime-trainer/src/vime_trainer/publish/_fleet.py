"""The engines that the router knows."""

from __future__ import annotations

import asyncio
import time

import grpc

from vime_proto.channel import call
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import describe
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc

_SKIPPED_HEALTH = (pb.ENGINE_HEALTH_UNHEALTHY, pb.ENGINE_HEALTH_DRAINING)


class Fleet:
    """Asks a router for engines that can take weights now."""

    def __init__(self, channel: grpc.aio.Channel, poll_seconds: float = 0.5):
        self._stub = router_pb2_grpc.RouterServiceStub(channel)
        self._poll_seconds = poll_seconds

    async def reachable(self) -> list[pb.EngineEntry]:
        """Engines that are neither unhealthy, nor draining, nor starting. Those left out catch up later by themselves."""
        answer = await call(self._stub.ListEngines, pb.ListEnginesRequest(refresh=True), timeout=10.0, deadline=60.0)
        return [
            entry
            for entry in answer.engines
            if entry.health not in _SKIPPED_HEALTH and entry.status.state != rollout_pb2.ENGINE_STATE_STARTING
        ]

    async def at_least(self, count: int, timeout: float) -> list[pb.EngineEntry]:
        """Waits until the router lists so many.

        Raises:
            TimeoutError: it does not within `timeout` seconds; says what it lists.
        """
        end = time.monotonic() + timeout
        while True:
            entries = await self.reachable()
            if len(entries) >= count:
                return entries
            if time.monotonic() >= end:
                names = ", ".join(entry.engine_id for entry in entries) or "none"
                raise TimeoutError(
                    f"{count} engines needed within {timeout:g} s; the router lists as reachable: {names}"
                )
            await asyncio.sleep(self._poll_seconds)

    async def set_minimum_version(self, version: common.PolicyVersion, request_id: str) -> str | None:
        """Tells the router the lowest version that may get requests; why it did not take it, or None."""
        request = pb.SetMinimumVersionRequest(request_id=request_id, version=version)
        try:
            await call(self._stub.SetMinimumVersion, request, timeout=10.0, deadline=30.0)
        except grpc.RpcError as error:
            return describe(error)
        return None
