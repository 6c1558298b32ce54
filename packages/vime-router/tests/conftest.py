from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from hypothesis import HealthCheck, settings
from scripted import Engine, serve_engine

from vime_proto.channel import open_channel
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2, router_pb2_grpc
from vime_router import RouterSettings, serve

# Property tests are indifferent to how busy the machine is.
settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")

FAST = {"interval_seconds": 0.1, "queued_interval_seconds": 0.02, "timeout_seconds": 0.5}


class Client:
    """A router and its callers."""

    def __init__(self, channel, address: str):
        self.channel, self.address = channel, address
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.fleet = router_pb2_grpc.RouterServiceStub(channel)
        self._count = 0

    def request_id(self) -> str:
        self._count += 1
        return f"call-{self._count}"

    async def generate(self, request_id: str | None = None, metadata=(), timeout=10.0) -> list[pb.GenerateResponse]:
        request = pb.GenerateRequest(request_id=request_id or self.request_id())
        return [answer async for answer in self.rollout.Generate(request, metadata=metadata, timeout=timeout)]

    async def engine_of(self, request_id: str | None = None, **more) -> str:
        return (await self.generate(request_id, **more))[-1].engine_id

    async def register(self, engine_id: str, address: str, **more):
        request = router_pb2.RegisterEngineRequest(
            request_id=self.request_id(), engine_id=engine_id, address=address, **more
        )
        return (await self.fleet.RegisterEngine(request)).engine

    async def drain(self, engine_id: str, **more):
        request = router_pb2.DrainEngineRequest(request_id=self.request_id(), engine_id=engine_id, **more)
        return (await self.fleet.DrainEngine(request)).engine

    async def deregister(self, engine_id: str) -> None:
        request = router_pb2.DeregisterEngineRequest(request_id=self.request_id(), engine_id=engine_id)
        await self.fleet.DeregisterEngine(request)

    async def need(self, version) -> None:
        request = router_pb2.SetMinimumVersionRequest(request_id=self.request_id(), version=version)
        await self.fleet.SetMinimumVersion(request)

    async def list(self, refresh: bool = False) -> router_pb2.ListEnginesResponse:
        return await self.fleet.ListEngines(router_pb2.ListEnginesRequest(refresh=refresh))

    async def entry(self, engine_id: str) -> router_pb2.EngineEntry | None:
        return next((one for one in (await self.list()).engines if one.engine_id == engine_id), None)


@contextlib.asynccontextmanager
async def run_router(engines: dict[str, str], **settings) -> AsyncIterator[Client]:
    """A router over engines ``{id: address}`` that checks them often."""
    health = FAST | settings.pop("health", {})
    values = {"policy": "round_robin", "engines": [{"id": k, "address": v} for k, v in engines.items()]} | settings
    async with (
        serve(RouterSettings(health=health, **values)) as server,
        open_channel(server.address) as channel,
    ):
        yield Client(channel, server.address)


@contextlib.asynccontextmanager
async def run_fleet(*ids: str, **settings) -> AsyncIterator[tuple[Client, dict[str, Engine]]]:
    """A router over scripted engines, all healthy."""
    async with contextlib.AsyncExitStack() as stack:
        engines = {engine_id: Engine(engine_id) for engine_id in ids}
        addresses = {
            engine_id: (await stack.enter_async_context(serve_engine(engine))).address
            for engine_id, engine in engines.items()
        }
        client = await stack.enter_async_context(run_router(addresses, **settings))
        await until(lambda: all_healthy(client, len(ids)))
        yield client, engines


async def all_healthy(client: Client, count: int) -> bool:
    entries = (await client.list()).engines
    return sum(one.health == router_pb2.ENGINE_HEALTH_HEALTHY for one in entries) == count


async def rest(call) -> list:
    """What is left of a stream whose first messages were read one by one."""
    answers = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)
    return answers


async def until(condition, timeout: float = 60.0) -> None:
    """Waits until ``condition()``, which may be a coroutine function, is true."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.01)


@pytest.fixture
async def pair():
    """A router over engines "a" and "b"."""
    async with run_fleet("a", "b") as both:
        yield both
