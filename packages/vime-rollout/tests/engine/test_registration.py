"""The engine tells a router about itself."""

import asyncio

import pytest

from vime_proto import fakes
from vime_proto.channel import open_channel
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.server import ServerOptions
from vime_rollout.engine._registration import Registration
from vime_rollout.engine._settings import EngineSettings


def settings(address, **more):
    return EngineSettings(model="m", engine_id="e1", router=address, **more)


async def engines(stub):
    return (await stub.ListEngines(pb.ListEnginesRequest(), wait_for_ready=True)).engines


async def until(condition, seconds=60.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        if await condition():
            return
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
async def engine():
    async with fakes.serve(fakes.FakeEngine("e1")) as server:
        yield server.address


async def test_registers_renews_and_deregisters(engine):
    async with fakes.serve(fakes.FakeRouter()) as router, open_channel(router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        registration = Registration(settings(router.address, lease_seconds=0.6, labels={"pool": "eval"}), engine)
        registration.start()
        await until(lambda: engines(stub))
        (entry,) = await engines(stub)
        assert entry.engine_id == "e1" and entry.address == engine and dict(entry.labels) == {"pool": "eval"}
        await asyncio.sleep(1.2)  # two leases
        assert len(await engines(stub)) == 1
        await registration.stop()
        assert not await engines(stub)


async def test_a_router_that_comes_late_is_tried_again(engine):
    async with fakes.serve(fakes.FakeRouter()) as router:
        address = router.address
    registration = Registration(settings(address, lease_seconds=0.3, advertise=engine), "unused:1")
    registration.start()
    await asyncio.sleep(0.3)
    async with fakes.serve(fakes.FakeRouter(), ServerOptions(address=address)), open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await until(lambda: engines(stub), 10)
        assert (await engines(stub))[0].address == engine
        await registration.stop()


async def test_a_router_with_tls_is_registered_at(engine, certificate):
    cert, key = certificate
    options = ServerOptions(tls_certificate=cert, tls_key=key)
    async with fakes.serve(fakes.FakeRouter(), options) as router, open_channel(router.address, tls_ca=cert) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        registration = Registration(settings(router.address, router_tls_ca=cert), engine)
        registration.start()
        await until(lambda: engines(stub))
        await registration.stop()
        assert not await engines(stub)
