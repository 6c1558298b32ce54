"""RolloutService by passing message bytes through, undecoded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict

import grpc
import grpc.aio

from vime_proto.errors import StatusError, describe
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_router._engines import Engines
from vime_router._fleet import Fleet
from vime_router._member import Member
from vime_router._metrics import Metrics
from vime_router._request import Request, read_request
from vime_router.settings import RouterSettings

log = logging.getLogger(__name__)
SERVICE = "vime.rollout.v1.RolloutService"
_REMEMBERED = 100_000
_POLL_SECONDS = 0.25


class Proxy:
    """Chooses an engine for each call and passes it on.

    A call may go to another engine only before its first message, after it was aborted on the first one. The same request
    id goes to the same engine while that lives, so that its answer is replayed and not generated twice.
    """

    def __init__(self, fleet: Fleet, engines: Engines, settings: RouterSettings, metrics: Metrics):
        self._fleet, self._engines, self._settings, self._metrics = fleet, engines, settings, metrics
        self._homes: OrderedDict[str, str] = OrderedDict()
        self.queued = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Score": grpc.unary_unary_rpc_method_handler(self.score),
                "Abort": grpc.unary_unary_rpc_method_handler(self.abort),
                "GetModelInfo": grpc.unary_unary_rpc_method_handler(self.model_info),
            },
        )

    async def generate(self, message: bytes, context: grpc.aio.ServicerContext):
        """Streams one continuation."""
        request = read_request(context.invocation_metadata(), message)
        avoid: set[str] = set()
        for attempt in range(1, self._settings.max_attempts + 1):
            member = await self._choose(request, avoid)
            sent = 0
            with self._on(member, request):
                channel = self._engines.channel(member.engine_id)
                call = channel.unary_stream(f"/{SERVICE}/Generate")(message, metadata=request.metadata)
                try:
                    async for answer in call:
                        sent += 1
                        yield answer
                    return
                except grpc.RpcError as error:
                    await self._failed(member, error, request, context, sent, attempt)
                    avoid.add(member.engine_id)
                except asyncio.CancelledError:
                    # Closing an engine's channel cancels its calls as a caller's cancellation does: tell them apart.
                    if self._is_gone(member):
                        raise _gone(member) from None
                    raise
                finally:
                    call.cancel()

    async def score(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Scores given tokens."""
        return await self._unary("Score", message, context)

    async def model_info(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Describes the model of an engine; the fleet serves one model."""
        return await self._unary("GetModelInfo", message, context)

    async def abort(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Ends requests early on every engine. An engine that cannot be reached has none that could go on."""
        wanted = pb.AbortRequest.FromString(message)

        async def one(member: Member) -> list[str]:
            stub = rollout_pb2_grpc.RolloutServiceStub(self._engines.channel(member.engine_id))
            try:
                return list((await stub.Abort(wanted, timeout=self._settings.health.timeout_seconds)).aborted)
            except grpc.RpcError as error:
                log.warning("abort did not reach engine %s: %s", member.engine_id, describe(error))
                self._engines.check_soon(member.engine_id)
                return []

        found = await asyncio.gather(*(one(member) for member in list(self._fleet.members.values())))
        return pb.AbortResponse(aborted=sorted({name for names in found for name in names})).SerializeToString()

    async def _unary(self, method: str, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        # GetModelInfo has no id, and all engines serve one model: no home for it.
        request = read_request(context.invocation_metadata(), message if method == "Score" else b"")
        avoid: set[str] = set()
        attempt = 0
        while True:
            attempt += 1
            member = await self._choose(request, avoid)
            with self._on(member, request):
                try:
                    channel = self._engines.channel(member.engine_id)
                    return await channel.unary_unary(f"/{SERVICE}/{method}")(message, metadata=request.metadata)
                except grpc.RpcError as error:
                    await self._failed(member, error, request, context, 0, attempt)
                    avoid.add(member.engine_id)

    async def _choose(self, request: Request, avoid: set[str]) -> Member:
        """An engine, after a wait if there is none.

        Raises:
            StatusError: UNAVAILABLE, when there is none within the queue's time-out; the text says why.
        """
        home = self._fleet.members.get(self._homes.get(request.request_id, ""))
        if home is not None and home.engine_id not in avoid and not home.obstacle(request.minimum_version):
            return home
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.queue_timeout_seconds
        self.queued += 1
        try:
            while True:
                member = self._fleet.choose(request.estimated_tokens, request.minimum_version, avoid)
                if member is not None:
                    self._remember(request.request_id, member.engine_id)
                    return member
                left = deadline - loop.time()
                if left <= 0:
                    raise StatusError(
                        grpc.StatusCode.UNAVAILABLE,
                        f"no engine took the request within {self._settings.queue_timeout_seconds:g} s: "
                        f"{self._fleet.obstacles(request.minimum_version)}",
                        retry_after=1.0,
                    )
                for engine_id in self._fleet.members:
                    self._engines.check_soon(engine_id)
                await self._fleet.changed(min(left, _POLL_SECONDS))
        finally:
            self.queued -= 1

    def _remember(self, request_id: str, engine_id: str) -> None:
        if request_id:
            self._homes[request_id] = engine_id
            self._homes.move_to_end(request_id)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)

    @contextlib.contextmanager
    def _on(self, member: Member, request: Request):
        member.outstanding_requests += 1
        member.outstanding_tokens += request.estimated_tokens
        member.requests_total += 1
        self._metrics.requests.labels(member.engine_id).inc()
        try:
            yield
        finally:
            member.outstanding_requests -= 1
            member.outstanding_tokens -= request.estimated_tokens
            if member.draining and not member.outstanding_requests:
                self._engines.check_soon(member.engine_id)

    def _is_gone(self, member: Member) -> bool:
        return self._fleet.members.get(member.engine_id) is not member

    async def _failed(self, member, error: grpc.RpcError, request: Request, context, sent: int, attempt: int) -> None:
        """Returns when another engine may be tried; ends the call otherwise."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            member.failures_total += 1
            self._metrics.failures.labels(member.engine_id).inc()
            self._engines.check_soon(member.engine_id)
            if self._is_gone(member):
                raise _gone(member)
            if sent:
                raise StatusError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"engine {member.engine_id} was lost after {sent} messages of request {request.request_id!r}: "
                    f"{error.details()}",
                )
            member.saw_bad(describe(error))
            if attempt < self._settings.max_attempts:
                self._metrics.retries.inc()
                await self._abort_on(member, request)
                return
        if error.code() is grpc.StatusCode.CANCELLED and self._is_gone(member):
            raise _gone(member)
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

    async def _abort_on(self, member: Member, request: Request) -> None:
        if not request.request_id or self._is_gone(member):
            return
        stub = rollout_pb2_grpc.RolloutServiceStub(self._engines.channel(member.engine_id))
        try:
            await stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=1.0)
        except grpc.RpcError as error:
            log.info("engine %s cannot be asked to abort: %s", member.engine_id, describe(error))


def _gone(member: Member) -> StatusError:
    return StatusError(grpc.StatusCode.UNAVAILABLE, f"engine {member.engine_id} was removed from the fleet")
