"""RolloutService by passing message bytes through, undecoded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
from grpc_status import rpc_status

from vime_proto.errors import ContractError, StatusError, describe, to_status
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_router._engines import SERVICE, Connection, Engines
from vime_router._fleet import Fleet
from vime_router._member import Member
from vime_router._queue import Queue
from vime_router._request import Request, read_request
from vime_router.settings import RouterSettings

log = logging.getLogger(__name__)
_REMEMBERED = 100_000
# Codes by which an engine says that it, and not the request, is at fault.
_ENGINE_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


class Proxy:
    """Chooses an engine for each call and passes it on.

    A call may go to another engine only before its first message, after it was aborted on the first one. The same request
    id goes to the same engine while that lives, so that its answer is replayed and not generated twice.

    Attributes:
        retries: calls that were moved to another engine.
    """

    def __init__(self, fleet: Fleet, engines: Engines, queue: Queue, settings: RouterSettings):
        self._fleet, self._engines, self._queue = fleet, engines, queue
        self._settings = settings
        self.retries = 0
        self._homes: OrderedDict[str, Member] = OrderedDict()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(_answering(self.generate)),
                "Score": grpc.unary_unary_rpc_method_handler(_answering(self.score)),
                "Abort": grpc.unary_unary_rpc_method_handler(_answering(self.abort)),
                "GetModelInfo": grpc.unary_unary_rpc_method_handler(_answering(self.model_info)),
            },
        )

    async def generate(self, message: bytes, context: grpc.aio.ServicerContext) -> None:
        """Streams one continuation."""
        request = read_request(context.invocation_metadata(), message)
        sent = 0

        async def stream(connection: Connection, member: Member) -> None:
            nonlocal sent
            metadata = request.metadata + self._engines.credentials
            call = connection.generate(message, timeout=context.time_remaining(), metadata=metadata)
            try:
                while (answer := await call.read()) is not grpc.aio.EOF:
                    sent += 1
                    member.messages += 1
                    await context.write(answer)
            finally:
                # The caller may be gone: then the engine must not go on.
                if not call.done():
                    call.cancel()

        aborted = await self._place(request, context, stream, lambda: sent)
        if aborted is _ABORTED:
            # A message without tokens states a version, too; no engine saw this request, so it is the one that it waited for.
            version = request.minimum_version or self._fleet.newest_version()
            ended = pb.GenerateResponse(
                request_id=request.request_id, version=version, finish_reason=sample_pb2.FINISH_REASON_ABORT
            )
            await context.write(ended.SerializeToString())

    async def score(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Scores given tokens."""
        return await self._unary("Score", message, context)

    async def model_info(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Describes the model of an engine; the fleet serves one model."""
        return await self._unary("GetModelInfo", message, context)

    async def abort(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Ends requests early, on every engine and in the queue. An engine that does not answer has none that could go on."""
        wanted = pb.AbortRequest.FromString(message)

        async def one(member: Member) -> list[str]:
            connection = self._engines.of(member)
            if connection is None:
                return []
            try:
                return list((await self._ask_abort(connection, wanted, self._settings.health.timeout_seconds)).aborted)
            except grpc.RpcError as error:
                log.warning("abort did not reach engine %s: %s", member.engine_id, describe(error))
                self._engines.check_soon(member)
                return []

        queued = self._queue.abort(wanted.request_ids)
        found = await asyncio.gather(*(one(member) for member in list(self._fleet.members.values())))
        names = {name for names in (queued, *found) for name in names if name}
        return pb.AbortResponse(aborted=sorted(names)).SerializeToString()

    async def _unary(self, method: str, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        # GetModelInfo has no id, and all engines serve one model: no home for it.
        request = read_request(context.invocation_metadata(), message if method == "Score" else b"")

        async def ask(connection: Connection, member: Member) -> bytes:
            answer = await connection.unary[method](
                message, timeout=context.time_remaining(), metadata=request.metadata + self._engines.credentials
            )
            member.messages += 1
            return answer

        answer = await self._place(request, context, ask, lambda: 0)
        if answer is _ABORTED:
            raise StatusError(grpc.StatusCode.CANCELLED, f"request {request.request_id!r} was aborted while it waited")
        return answer

    async def _place(
        self,
        request: Request,
        context: grpc.aio.ServicerContext,
        run: Callable[[Connection, Member], Awaitable],
        sent: Callable[[], int],
    ):
        """Runs a call on an engine, and on another one as long as nothing was sent to the caller."""
        avoid: set[str] = set()
        failures = 0
        while True:
            member = await self._choose(request, avoid)
            if member is None:
                return _ABORTED
            connection = self._engines.of(member)
            if connection is None:
                raise _ended(member)
            with self._on(member, request):
                try:
                    return await run(connection, member)
                except grpc.RpcError as error:
                    failed = error
                except asyncio.CancelledError:
                    # Closing an engine's channel ends its calls like a cancelled caller: only the latter cancels us.
                    if asyncio.current_task().cancelling():
                        raise
                    raise _ended(member) from None
            failures += await self._failed(member, failed, request, context, sent(), failures)
            avoid.add(member.engine_id)

    async def _choose(self, request: Request, avoid: set[str]) -> Member | None:
        """An engine, after a wait if there is none; None when the request was aborted in the queue."""

        def pick() -> Member | None:
            home = self._homes.get(request.request_id)
            if home is not None and home.engine_id not in avoid and self._fleet.members.get(home.engine_id) is home:
                # A repetition is nothing new to a draining engine, nor to one below the fleet's minimum version.
                if not home.fault(request.minimum_version):
                    return home
            return self._fleet.choose(request.estimated_tokens, request.minimum_version, avoid)

        member = pick()
        if member is None:
            member = await self._queue.wait(request, pick)
        if member is not None and request.request_id:
            self._homes[request.request_id] = member
            self._homes.move_to_end(request.request_id)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return member

    @contextlib.contextmanager
    def _on(self, member: Member, request: Request):
        member.outstanding_requests += 1
        member.outstanding_tokens += request.estimated_tokens
        member.requests_total += 1
        try:
            yield
        finally:
            member.outstanding_requests -= 1
            member.outstanding_tokens -= request.estimated_tokens
            if member.idle and self._fleet.members.get(member.engine_id) is not member:
                self._engines.settled(member)
            elif member.draining:
                self._fleet.sweep()

    async def _failed(
        self, member: Member, error: grpc.RpcError, request: Request, context, sent: int, failures: int
    ) -> int:
        """Returns how many failures this was when another engine may be tried; ends the call otherwise."""
        if member.gone:
            raise _ended(member)
        code = error.code()
        # A server that stops ends its calls with CANCELLED, as an engine ends an aborted one.
        lost = code is grpc.StatusCode.UNAVAILABLE or (
            code is grpc.StatusCode.CANCELLED and not await self._engines.check(member)
        )
        if not lost:
            if code in _ENGINE_FAULTS:
                member.failures_total += 1
            await context.abort(code, error.details() or "", tuple(error.trailing_metadata() or ()))
        if sent:
            member.failures_total += 1
            member.saw_bad(describe(error))
            self._engines.check_soon(member)
            raise StatusError(
                grpc.StatusCode.UNAVAILABLE,
                f"engine {member.engine_id} was lost after {sent} messages of request {request.request_id!r}: "
                f"{error.details()}",
            )
        # Asleep, stale or starting engines answer the same code as lost ones: ask which it is.
        if await self._engines.check(member) and member.fault(None):
            return 0
        member.failures_total += 1
        member.saw_bad(describe(error))
        if failures + 1 >= self._settings.max_attempts:
            raise StatusError(
                grpc.StatusCode.UNAVAILABLE,
                f"{failures + 1} attempts failed, the last on engine {member.engine_id}: {error.details()}",
            )
        self.retries += 1
        await self._abort_on(member, request)
        if self._fleet.choose(request.estimated_tokens, request.minimum_version, {member.engine_id}) is member:
            # There is no other engine: give this one a moment.
            await asyncio.sleep(self._settings.health.queued_interval_seconds)
        return 1

    async def _abort_on(self, member: Member, request: Request) -> None:
        connection = self._engines.of(member)
        if not request.request_id or connection is None:
            return
        try:
            await self._ask_abort(connection, pb.AbortRequest(request_ids=[request.request_id]), 1.0)
        except grpc.RpcError as error:
            log.info("engine %s cannot be asked to abort: %s", member.engine_id, describe(error))

    def _ask_abort(
        self, connection: Connection, wanted: pb.AbortRequest, timeout: float
    ) -> Awaitable[pb.AbortResponse]:
        return connection.abort(wanted, timeout=timeout, metadata=self._engines.credentials)


class _Aborted:
    """Stands for the answer of a request that was aborted before it reached an engine."""


_ABORTED = _Aborted()


def _ended(member: Member) -> StatusError:
    why = "was removed from the fleet" if member.gone else "was disconnected"
    return StatusError(grpc.StatusCode.UNAVAILABLE, f"engine {member.engine_id} {why}")


def _answering(method):
    """Renders errors of a handler. Coroutines that write are not rendered by the server's own interceptor."""

    async def handle(message: bytes, context: grpc.aio.ServicerContext):
        try:
            return await method(message, context)
        except (ContractError, StatusError) as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))

    return handle
