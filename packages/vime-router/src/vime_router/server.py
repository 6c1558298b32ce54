"""Puts the router together."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator

import prometheus_client

from vime_proto.channel import split_address
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.server import RunningServer, ServerInfo, metrics_endpoint, start_server
from vime_router._engines import SERVICE, Engines
from vime_router._fleet import Fleet
from vime_router._metrics import Metrics
from vime_router._proxy import Proxy
from vime_router._queue import Queue
from vime_router._service import RouterService
from vime_router.policies import make_policy
from vime_router.settings import RouterSettings


@contextlib.asynccontextmanager
async def serve(settings: RouterSettings) -> AsyncIterator[RunningServer]:
    """Runs a router as long as the context lasts.

    Raises:
        AddressInUseError: the address is taken.
        ContractError: an unknown policy.
        OSError: a file or a port of the settings that cannot be used; names the key.
    """
    import vime_router

    fleet = Fleet(make_policy(settings.policy, random.Random(settings.seed)), settings.health, time.monotonic)
    engines = Engines(fleet, settings)
    queue = Queue(fleet, settings.queue_timeout_seconds, settings.queue_limit, engines.check_soon)
    engines.hurry = lambda: len(queue) > 0
    proxy = Proxy(fleet, engines, queue, settings)
    service = RouterService(fleet, engines, queue, settings.policy)
    server = await start_server(
        [(router_pb2_grpc.add_RouterServiceServicer_to_server, service, "vime.router.v1.RouterService")],
        ServerInfo(package="vime-router", package_version=vime_router.__version__, role="router"),
        settings.server.options(),
        generic_handlers=[proxy.handler()],
        generic_names=[SERVICE],
    )
    exporter = None
    try:
        engines.start()
        for engine in settings.engines:
            engines.add(fleet.register(engine.id, engine.address, {}, None))
        if settings.metrics_port is not None:
            metrics, host = Metrics(fleet, queue, proxy), split_address(settings.server.address)[0]
            with metrics_endpoint(host, settings.metrics_port):
                exporter, _ = prometheus_client.start_http_server(
                    settings.metrics_port, addr=host, registry=metrics.registry
                )
        await server.set_serving(True)
        yield server
    finally:
        if exporter is not None:
            exporter.shutdown()
            exporter.server_close()
        await server.stop(1.0)
        await engines.close()
