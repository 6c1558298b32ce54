"""RouterService over the wire."""

import asyncio
import time

import grpc
import pytest
from conftest import all_healthy, rest, run_fleet, run_router, until
from scripted import Engine, serve_engine

from vime_proto.common.v1 import common_pb2, common_pb2_grpc
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.router.v1 import router_pb2


async def test_a_lease_lapses_unless_it_is_renewed():
    async with serve_engine(Engine("a")) as server, run_router({}) as client:
        entry = await client.register("a", server.address, lease_seconds=0.4, labels={"pool": "eval"})
        assert 0.0 < entry.lease_seconds <= 0.4
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            await client.register("a", server.address, lease_seconds=0.4)
            assert await client.entry("a") is not None
            await asyncio.sleep(0.1)
        await until(lambda: is_gone(client, "a"))


async def is_gone(client, engine_id):
    return await client.entry(engine_id) is None


async def test_a_lapsed_lease_lets_running_requests_finish():
    engine = Engine("a")
    engine.hold_at = 1
    engine.hold.clear()
    async with serve_engine(engine) as server, run_router({}) as client:
        await client.register("a", server.address, lease_seconds=0.3)
        call = client.rollout.Generate(pb.GenerateRequest(request_id="r"))
        await call.read()
        await until(lambda: is_gone(client, "a"))
        engine.hold.set()
        assert len(await rest(call)) == 2


async def test_registration_is_idempotent_and_another_payload_is_refused():
    async with serve_engine(Engine("a")) as server, run_router({}) as client:
        request = router_pb2.RegisterEngineRequest(request_id="x", engine_id="a", address=server.address)
        first = await client.fleet.RegisterEngine(request)
        assert await client.fleet.RegisterEngine(request) == first
        request.labels["pool"] = "eval"
        with pytest.raises(grpc.RpcError) as caught:
            await client.fleet.RegisterEngine(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_labels_select(pair):
    client, engines = pair
    entries = (await client.list()).engines
    await client.register("a", entries[0].address, labels={"pool": "eval"})
    chosen = await client.fleet.ListEngines(router_pb2.ListEnginesRequest(labels={"pool": "eval"}))
    assert [one.engine_id for one in chosen.engines] == ["a"]
    assert [one.engine_id for one in (await client.list()).engines] == ["a", "b"]


async def test_deregistering_ends_requests_at_once(pair):
    client, engines = pair
    for engine in engines.values():
        engine.hold.clear()
    streams = [client.rollout.Generate(pb.GenerateRequest(request_id=f"r{number}")) for number in range(4)]
    scores = [client.rollout.Score(pb.ScoreRequest(request_id=f"s{number}")) for number in range(2)]
    await until(lambda: sum(len(engine.seen) for engine in engines.values()) == 6)
    for name in engines:
        await client.deregister(name)
    for call in streams:
        with pytest.raises(grpc.RpcError, match="was removed from the fleet") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for call in scores:
        with pytest.raises(grpc.RpcError, match="was removed from the fleet"):
            await call
    with pytest.raises(grpc.RpcError, match="'a' is not registered; registered: none") as caught:
        await client.deregister("a")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await until(lambda: all(len(engine.cancelled) == 2 for engine in engines.values()))


async def test_draining_finishes_what_is_there_and_then_leaves(pair):
    client, engines = pair
    engines["a"].hold_at = 1
    engines["a"].hold.clear()
    calls = [client.rollout.Generate(pb.GenerateRequest(request_id=f"r{number}")) for number in range(2)]
    first = {(await call.read()).engine_id: call for call in calls}
    entry = await client.drain("a", then_remove=True)
    assert entry.health == router_pb2.ENGINE_HEALTH_DRAINING and entry.outstanding_requests == 1
    assert {await client.engine_of() for _ in range(4)} == {"b"}
    engines["a"].hold.set()
    assert len(await rest(first["a"])) == 2
    await until(lambda: is_gone(client, "a"))


async def test_draining_can_be_undone(pair):
    client, engines = pair
    await client.drain("a", then_remove=False)
    assert {await client.engine_of() for _ in range(4)} == {"b"}
    await client.drain("a", undo=True)
    assert {await client.engine_of() for _ in range(4)} == {"a", "b"}


async def test_a_drained_engine_that_was_started_again_at_its_address_serves():
    async with run_router({}) as client:
        async with serve_engine(Engine("a")) as server:
            address = server.address
            await client.register("a", address)
            await until(lambda: all_healthy(client, 1))
            await client.drain("a")
            await asyncio.sleep(0.3)
            assert (await client.entry("a")).health == router_pb2.ENGINE_HEALTH_DRAINING, "the same life stays drained"
        # Killed: it did not deregister. Its lease, if it has one, still holds.
        async with serve_engine(Engine("a"), address):
            await until(lambda: all_healthy(client, 1))
            assert await client.engine_of() == "a"


async def test_an_idle_engine_is_removed_as_soon_as_it_drains(pair):
    client, _ = pair
    assert (await client.drain("a", then_remove=True)).engine_id == "a"
    assert await is_gone(client, "a")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"engine_id": ""}, "engine_id"),
        ({"request_id": ""}, "request_id"),
        ({"address": "nowhere"}, "address"),
        ({"address": "::1:5"}, "address"),
        ({"lease_seconds": 0.0}, "lease_seconds"),
    ],
)
async def test_registrations_that_break_the_contract_are_refused(change, field):
    async with run_router({}) as client:
        values = {"request_id": "x", "engine_id": "a", "address": "127.0.0.1:1"} | change
        with pytest.raises(grpc.RpcError, match=field) as caught:
            await client.fleet.RegisterEngine(router_pb2.RegisterEngineRequest(**values))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not (await client.list()).engines


async def test_the_router_says_what_it_is():
    async with run_router({}) as client:
        info = await common_pb2_grpc.InfoServiceStub(client.channel).GetInfo(common_pb2.GetInfoRequest())
        assert (info.package, info.role) == ("vime-router", "router")
        assert {"vime.rollout.v1.RolloutService", "vime.router.v1.RouterService"} <= set(info.services)


async def test_engines_over_ipv6_and_despite_a_proxy_variable(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with (
        serve_engine(Engine("a"), "[::1]:0") as server,
        run_router({"a": server.address}, server={"address": "[::1]:0"}) as client,
    ):
        assert client.address.startswith("[::1]:") and server.address.startswith("[::1]:")
        assert await client.engine_of() == "a"


async def test_refresh_asks_engines_now():
    async with run_fleet("a", health={"interval_seconds": 60.0}) as (client, engines):
        engines["a"].state = pb.ENGINE_STATE_RECEIVING
        assert (await client.list()).engines[0].status.state == pb.ENGINE_STATE_SERVING
        assert (await client.list(refresh=True)).engines[0].status.state == pb.ENGINE_STATE_RECEIVING
