"""The queue, and engines that cannot take requests for a while."""

import asyncio
import contextlib
import time

import grpc
import pytest
from conftest import run_fleet, run_router, until
from scripted import Engine, serve_engine

from vime_proto import metadata as keys
from vime_proto.errors import from_rpc_error
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import policy_version, show


async def queued(client, count):
    return (await client.list()).queued == count


async def test_requests_wait_for_the_first_engine():
    async with run_router({}) as client:
        calls = [asyncio.create_task(client.engine_of()) for _ in range(5)]
        await until(lambda: queued(client, 5))
        async with serve_engine(Engine("a")) as server:
            await client.register("a", server.address)
            assert await asyncio.gather(*calls) == ["a"] * 5
        assert await queued(client, 0)


async def test_the_wait_is_bounded_and_the_error_says_why():
    async with run_fleet("a", queue_timeout_seconds=0.3) as (client, engines):
        engines["a"].state, engines["a"].reason = pb.ENGINE_STATE_STALE, "update u1 failed"
        await client.list(refresh=True)
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            await client.generate()
        assert 0.25 < time.monotonic() - begin < 30.0
        status = from_rpc_error(caught.value)
        assert status.code is grpc.StatusCode.UNAVAILABLE and status.retry_after == 1.0
        assert status.message == "no engine took the request within 0.3 s: a: STALE: update u1 failed"


async def test_a_full_queue_refuses():
    async with run_router({}, queue_limit=2) as client:
        calls = [asyncio.create_task(client.generate()) for _ in range(2)]
        await until(lambda: queued(client, 2))
        with pytest.raises(
            grpc.RpcError, match="2 requests wait for an engine already: no engine is registered"
        ) as one:
            await client.generate()
        assert one.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await until(lambda: queued(client, 0))


async def test_asleep_engines_are_no_failures_and_get_requests_when_they_wake():
    async with run_fleet("a", health={"interval_seconds": 30.0}) as (client, engines):
        # The router does not know yet: the engine's refusal makes it look, and wait.
        engines["a"].state = pb.ENGINE_STATE_ASLEEP
        call = asyncio.create_task(client.engine_of())
        await until(lambda: queued(client, 1))
        entry = await client.entry("a")
        assert (entry.failures_total, entry.reason) == (0, "ASLEEP")
        engines["a"].state = pb.ENGINE_STATE_SERVING
        assert await asyncio.wait_for(call, 30) == "a"


async def test_a_request_for_a_version_waits_for_it():
    async with run_fleet("a") as (client, engines):
        call = asyncio.create_task(client.engine_of(metadata=[(keys.MINIMUM_VERSION, "run/0:2")]))
        await until(lambda: queued(client, 1))
        assert await client.engine_of() == "a"
        engines["a"].version = policy_version("run", 0, 2)
        assert await asyncio.wait_for(call, 30) == "a"


async def test_an_engine_behind_the_minimum_version_gets_nothing_until_it_has_it():
    async with run_fleet("a", "b") as (client, engines):
        engines["a"].version = policy_version("run", 0, 2)
        await client.need(policy_version("run", 0, 2))
        assert {await client.engine_of() for _ in range(4)} == {"a"}
        entry = await client.entry("b")
        assert entry.reason == "at version run/0:1, needs run/0:2"
        assert (await client.list()).minimum_version == policy_version("run", 0, 2)
        engines["b"].version = policy_version("run", 0, 2)
        await until(lambda: serves(client, "b"))
        await client.need(policy_version("run", 1, 0))
        assert all(one.reason for one in (await client.list()).engines)
        await client.need(None)
        assert {await client.engine_of() for _ in range(4)} == {"a", "b"}


async def serves(client, engine_id):
    return await client.engine_of() == engine_id


async def test_an_aborted_request_in_the_queue_ends_as_an_engine_would_end_it():
    async with run_router({}) as client:
        call = asyncio.create_task(client.generate("r1"))
        other = asyncio.create_task(client.generate("r2"))
        score = asyncio.create_task(score_of(client, "s1"))
        await until(lambda: queued(client, 3))
        answer = await client.rollout.Abort(pb.AbortRequest(request_ids=["r1", "s1", "unknown"]))
        assert answer.aborted == ["r1", "s1"]
        (last,) = await call
        assert (last.request_id, last.finish_reason) == ("r1", sample_pb2.FINISH_REASON_ABORT)
        assert await score is grpc.StatusCode.CANCELLED
        assert not other.done()
        assert (await client.rollout.Abort(pb.AbortRequest())).aborted == ["r2"]
        assert len(await other) == 1


async def test_an_aborted_request_in_the_queue_states_a_version():
    async with run_fleet("a", "b") as (client, engines):
        for number, engine in enumerate(engines.values()):
            engine.version, engine.state = policy_version("run", 0, number), pb.ENGINE_STATE_STALE
        await client.list(refresh=True)
        calls = [
            asyncio.create_task(client.generate("r1")),
            asyncio.create_task(client.generate("r2", metadata=[(keys.MINIMUM_VERSION, "run/0:7")])),
        ]
        await until(lambda: queued(client, 2))
        await client.rollout.Abort(pb.AbortRequest())
        answers = [answer for answers in await asyncio.gather(*calls) for answer in answers]
        assert [show(answer.version) for answer in answers] == ["run/0:1", "run/0:7"]


async def score_of(client, request_id):
    try:
        await client.rollout.Score(pb.ScoreRequest(request_id=request_id))
    except grpc.RpcError as error:
        return error.code()


async def test_a_paused_engine_holds_the_request_itself():
    async with run_fleet("a") as (client, engines):
        engine = engines["a"]
        engine.state = pb.ENGINE_STATE_PAUSED
        engine.hold.clear()
        await client.list(refresh=True)
        call = asyncio.create_task(client.engine_of())
        await until(lambda: len(engine.seen) == 1)
        engine.hold.set()
        assert await call == "a"


async def test_a_long_generation_and_late_checks_do_not_take_an_engine_out():
    """Ten times the health window; every check is late, but tokens come."""
    async with run_fleet("a", health={"timeout_seconds": 0.1, "interval_seconds": 0.05}) as (client, engines):
        engine = engines["a"]
        engine.tokens, engine.pace = 60, 0.02
        engine.status_delay = 10.0
        begin = time.monotonic()
        answers = await client.generate("long")
        assert time.monotonic() - begin > 1.0 and len(answers) == 60
        entry = await client.entry("a")
        assert (entry.reason, entry.failures_total) == ("", 0)


async def test_an_engine_that_stops_answering_is_out_and_in_again_when_it_is_back():
    async with run_fleet("b") as (client, _), contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_engine(Engine("a")))
        await client.register("a", server.address)
        await until(lambda: serves(client, "a"))
        await stack.aclose()
        await until(lambda: has_reason(client, "a"))
        assert {await client.engine_of() for _ in range(3)} == {"b"}
        async with serve_engine(Engine("a"), server.address):
            await until(lambda: serves(client, "a"))


async def has_reason(client, engine_id):
    return bool((await client.entry(engine_id)).reason)
