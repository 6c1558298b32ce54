"""Serving fakes, in a test or as a process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from vime_proto import __version__
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.server import RunningServer, ServerInfo, ServerOptions, start_server

_ROLLOUT = rollout_pb2_grpc
_SERVICES = [
    (
        "buffer",
        buffer_pb2_grpc.BufferServiceServicer,
        buffer_pb2_grpc.add_BufferServiceServicer_to_server,
        "vime.buffer.v1.BufferService",
    ),
    (
        "router",
        router_pb2_grpc.RouterServiceServicer,
        router_pb2_grpc.add_RouterServiceServicer_to_server,
        "vime.router.v1.RouterService",
    ),
    (
        "engine",
        _ROLLOUT.RolloutServiceServicer,
        _ROLLOUT.add_RolloutServiceServicer_to_server,
        "vime.rollout.v1.RolloutService",
    ),
    (
        "engine",
        _ROLLOUT.EngineControlServiceServicer,
        _ROLLOUT.add_EngineControlServiceServicer_to_server,
        "vime.rollout.v1.EngineControlService",
    ),
]


@contextlib.asynccontextmanager
async def serve(
    servicer, options: ServerOptions = ServerOptions(), role: str | None = None
) -> AsyncIterator[RunningServer]:
    """Serves a fake (or any servicer) with every service that it implements; SERVING when entered, stopped when left.

        async with serve(FakeBuffer()) as server:
            channel = open_channel(server.address)

    Args:
        servicer: implements one or several of BufferService, RolloutService, EngineControlService, RouterService.
        options: where it listens; a free port of loopback unless stated.
        role: what InfoService says; the name of the first service's stage unless stated.
    """
    services, found = [], ""
    for stage, kind, add, name in _SERVICES:
        if isinstance(servicer, kind):
            services.append((add, servicer, name))
            found = found or stage
    # The servicer's own dictionary: what it proves later shows.
    info = ServerInfo("vime-proto", role or found, __version__, capabilities=getattr(servicer, "capabilities", {}))
    server = await start_server(services, info, options)
    started = getattr(servicer, "start", None)
    if started is not None:
        await started()
    await server.set_serving(True)
    try:
        yield server
    finally:
        stopped = getattr(servicer, "stop", None)
        if stopped is not None:
            await stopped()
        await server.stop(0.2)
