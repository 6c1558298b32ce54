"""An in-memory router: RouterService, and RolloutService passed through to engines in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping

import grpc

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import StatusError, from_rpc_error
from vime_proto.fakes._fleet import Fleet, Member
from vime_proto.idempotency import RequestLog
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.validate import validate_engine_change, validate_minimum_version, validate_register_engine

_REMEMBERED = 10_000


class FakeRouter(router_pb2_grpc.RouterServiceServicer, rollout_pb2_grpc.RolloutServiceServicer):
    """A router; engines register, or are given.

    Args:
        engines: addresses by engine id.
        check_seconds: between two looks at every engine.
    """

    def __init__(self, engines: Mapping[str, str] | None = None, check_seconds: float = 0.05):
        self.fleet = Fleet()
        self.capabilities = self.fleet.capabilities
        self._given = dict(engines or {})
        self._check_seconds = check_seconds
        self._log = RequestLog()
        self._owner: OrderedDict[str, str] = OrderedDict()
        self._watch: asyncio.Task | None = None

    async def start(self) -> None:
        """Starts to look at engines."""
        for engine_id, address in self._given.items():
            await self.fleet.register(pb.RegisterEngineRequest(engine_id=engine_id, address=address))
        self._watch = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Ends that, and every call."""
        self._watch.cancel()
        for member in list(self.fleet.members.values()):
            await self.fleet.remove(member)

    async def _look(self) -> None:
        while True:
            await self.fleet.check_all()
            await asyncio.sleep(self._check_seconds)

    # RouterService --------------------------------------------------------------------------------------------

    async def RegisterEngine(self, request, context):
        validate_register_engine(request)

        async def execute():
            return pb.RegisterEngineResponse(engine=self.fleet.entry(await self.fleet.register(request)))

        return await self._log.run(request.request_id, request, execute)

    async def DeregisterEngine(self, request, context):
        validate_engine_change(request)

        async def execute():
            await self.fleet.remove(self.fleet.get(request.engine_id))
            return pb.DeregisterEngineResponse()

        return await self._log.run(request.request_id, request, execute)

    async def DrainEngine(self, request, context):
        validate_engine_change(request)

        async def execute():
            member = self.fleet.get(request.engine_id)
            member.draining, member.then_remove = not request.undo, request.then_remove and not request.undo
            entry = self.fleet.entry(member)
            await self.fleet.check(member)
            await self.fleet.drop_lapsed()
            return pb.DrainEngineResponse(engine=entry)

        return await self._log.run(request.request_id, request, execute)

    async def ListEngines(self, request, context):
        if request.refresh:
            await self.fleet.check_all()
        else:
            await self.fleet.drop_lapsed()
        wanted = request.labels.items()
        members = [m for _, m in sorted(self.fleet.members.items()) if all(m.labels.get(k) == v for k, v in wanted)]
        return pb.ListEnginesResponse(
            engines=[self.fleet.entry(member) for member in members],
            policy="round_robin",
            minimum_version=self.fleet.minimum,
            queued=self.fleet.queued,
        )

    async def SetMinimumVersion(self, request, context):
        validate_minimum_version(request)

        async def execute():
            self.fleet.minimum = None
            if request.HasField("version"):
                self.fleet.minimum = common.PolicyVersion()
                self.fleet.minimum.CopyFrom(request.version)
            await self.fleet.check_all()
            return pb.SetMinimumVersionResponse()

        return await self._log.run(request.request_id, request, execute)

    # RolloutService -------------------------------------------------------------------------------------------

    async def Generate(self, request, context):
        avoid: set[str] = set()
        while True:
            member = await self.fleet.choose(self._owner.get(request.request_id, ""), frozenset(avoid))
            self._remember(request.request_id, member)
            call = member.rollout.Generate(request, metadata=context.invocation_metadata())
            started = False
            try:
                with self._counted(member, call):
                    async for message in call:
                        started = True
                        yield message
                return
            except (grpc.RpcError, asyncio.CancelledError) as error:
                if not self._may_retry(error, member, started):
                    raise self._rendered(error, member) from None
                avoid.add(member.engine_id)
                await self._abort_quietly(member, [request.request_id])

    def _may_retry(self, error, member: Member, started: bool) -> bool:
        gone = member.engine_id not in self.fleet.members
        if started or gone or not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        member.failures += 1
        member.reason = f"UNAVAILABLE: {error.details()}"
        return True

    def _rendered(self, error, member: Member) -> BaseException:
        if member.engine_id not in self.fleet.members:
            return StatusError(grpc.StatusCode.UNAVAILABLE, f"engine {member.engine_id!r} was removed")
        return from_rpc_error(error) if isinstance(error, grpc.RpcError) else error

    def _remember(self, request_id: str, member: Member) -> None:
        self._owner[request_id] = member.engine_id
        while len(self._owner) > _REMEMBERED:
            self._owner.popitem(last=False)

    @contextlib.contextmanager
    def _counted(self, member: Member, call):
        member.requests += 1
        member.outstanding += 1
        member.calls.add(call)
        try:
            yield
        finally:
            member.outstanding -= 1
            member.calls.discard(call)
            call.cancel()

    async def Score(self, request, context):
        return await self._unary("Score", request, context)

    async def GetModelInfo(self, request, context):
        return await self._unary("GetModelInfo", request, context)

    async def _unary(self, method: str, request, context):
        member = await self.fleet.choose()
        call = getattr(member.rollout, method)(request, metadata=context.invocation_metadata())
        try:
            with self._counted(member, call):
                return await call
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise self._rendered(error, member) from None

    async def Abort(self, request, context):
        members = list(self.fleet.members.values())
        answers = await asyncio.gather(*(self._abort_quietly(member, request.request_ids) for member in members))
        return rollout_pb2.AbortResponse(aborted=sorted({one for answer in answers for one in answer}))

    async def _abort_quietly(self, member: Member, request_ids) -> list[str]:
        """An engine that cannot be reached has nothing to abort."""
        try:
            answer = await member.rollout.Abort(rollout_pb2.AbortRequest(request_ids=request_ids), timeout=2.0)
        except grpc.RpcError as error:
            member.reason = f"{error.code().name}: {error.details()}"
            return []
        return list(answer.aborted)
