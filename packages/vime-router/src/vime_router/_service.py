"""RouterService: the fleet, over gRPC."""

from __future__ import annotations

import time

from vime_proto.idempotency import RequestLog
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.validate import validate_engine_change, validate_minimum_version, validate_register_engine
from vime_router._engines import Engines
from vime_router._fleet import Fleet
from vime_router._queue import Queue


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Registration, drain, removal, minimum version."""

    def __init__(self, fleet: Fleet, engines: Engines, queue: Queue, policy: str):
        self._fleet, self._engines, self._queue, self._policy = fleet, engines, queue, policy
        self._log = RequestLog()

    async def RegisterEngine(self, request, context):
        validate_register_engine(request)

        async def register():
            lease = request.lease_seconds if request.HasField("lease_seconds") else None
            member = self._fleet.register(request.engine_id, request.address, dict(request.labels), lease)
            self._engines.add(member)
            return pb.RegisterEngineResponse(engine=self._entry(member))

        return await self._log.run(request.request_id, request, register)

    async def DeregisterEngine(self, request, context):
        validate_engine_change(request)

        async def deregister():
            self._fleet.remove(request.engine_id)
            return pb.DeregisterEngineResponse()

        return await self._log.run(request.request_id, request, deregister)

    async def DrainEngine(self, request, context):
        validate_engine_change(request)

        async def drain():
            member = self._fleet.drain(request.engine_id, request.then_remove, request.undo)
            entry = self._entry(member)
            self._fleet.sweep()
            return pb.DrainEngineResponse(engine=entry)

        return await self._log.run(request.request_id, request, drain)

    async def ListEngines(self, request, context):
        if request.refresh:
            await self._engines.refresh()
        self._fleet.sweep()
        chosen = [
            self._entry(self._fleet.members[engine_id])
            for engine_id in sorted(self._fleet.members)
            if request.labels.items() <= self._fleet.members[engine_id].labels.items()
        ]
        return pb.ListEnginesResponse(
            engines=chosen, policy=self._policy, minimum_version=self._fleet.minimum_version, queued=len(self._queue)
        )

    async def SetMinimumVersion(self, request, context):
        validate_minimum_version(request)

        async def set_minimum():
            self._fleet.minimum_version = request.version if request.HasField("version") else None
            self._engines.check_soon()
            return pb.SetMinimumVersionResponse()

        return await self._log.run(request.request_id, request, set_minimum)

    def _entry(self, member) -> pb.EngineEntry:
        return member.entry(self._fleet.minimum_version, time.monotonic())
