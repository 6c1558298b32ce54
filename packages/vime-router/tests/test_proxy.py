"""Calls through a router, over real connections."""

import asyncio
import gzip

import grpc
import pytest
from conftest import all_healthy, run_fleet, until
from scripted import Engine, serve_engine

from vime_proto import metadata as keys
from vime_proto.errors import ContractError, StatusError, from_rpc_error
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_answers_come_through_whole_and_in_turn(pair):
    client, engines = pair
    answers = await client.generate("r1")
    assert [answer.token_ids.data[0] for answer in answers] == [0, 1, 2]
    assert answers[-1].finish_reason == sample_pb2.FINISH_REASON_LENGTH
    assert {await client.engine_of() for _ in range(4)} == {"a", "b"}
    assert (await client.rollout.Score(pb.ScoreRequest(request_id="s"))).engine_id in engines
    assert (await client.rollout.GetModelInfo(pb.GetModelInfoRequest())).vocab_size == 32


async def test_messages_are_passed_on_undecoded():
    """A field that this contract version does not know reaches the engine, as do bytes that are no message at all."""
    async with run_fleet("a") as (client, engines):
        call = client.channel.unary_stream("/vime.rollout.v1.RolloutService/Generate")
        message = pb.GenerateRequest(request_id="r").SerializeToString() + b"\xfa\x7f\x05vime!"
        assert len([answer async for answer in call(message)]) == 3
        assert engines["a"].raw == [message]
        with pytest.raises(grpc.RpcError, match="Error parsing message"):
            await call(b"\xff\xff\xff").read()


async def test_metadata_is_passed_on_but_not_the_callers_token(pair):
    client, engines = pair
    given = [(keys.SESSION, "s1"), (keys.ESTIMATED_TOKENS, "12"), ("x-mine", "1"), ("authorization", "Bearer secret")]
    engine = engines[await client.engine_of("r1", metadata=given)]
    seen = engine.seen[0][1]
    assert (seen[keys.SESSION], seen["x-mine"]) == ("s1", "1")
    assert "authorization" not in seen


async def test_metadata_of_another_form_is_refused_by_name(pair):
    client, _ = pair
    with pytest.raises(grpc.RpcError) as caught:
        await client.generate(metadata=[(keys.ESTIMATED_TOKENS, "many")])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(caught.value).violations[0][0] == keys.ESTIMATED_TOKENS


async def test_compressed_and_large_messages(pair):
    client, _ = pair
    request = pb.GenerateRequest(request_id="big")
    request.prompt_token_ids.data = gzip.compress(b"x") + bytes(8 << 20)
    call = client.rollout.Generate(request, compression=grpc.Compression.Gzip)
    assert len([answer async for answer in call]) == 3


async def test_an_engines_error_arrives_with_its_details(pair):
    client, engines = pair
    for engine in engines.values():
        engine.error = ContractError("sampling.max_new_tokens", "must be set")
    with pytest.raises(grpc.RpcError) as caught:
        await client.generate()
    status = from_rpc_error(caught.value)
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.violations == [("sampling.max_new_tokens", "must be set")]
    assert sum(len(engine.seen) for engine in engines.values()) == 1, "the caller's fault is not tried elsewhere"


async def test_engine_faults_are_counted_but_do_not_take_it_out(pair):
    client, engines = pair
    engines["a"].error = StatusError(grpc.StatusCode.INTERNAL, "boom")
    codes = []
    for _ in range(12):
        try:
            await client.generate()
        except grpc.RpcError as error:
            codes.append(error.code())
    assert codes == [grpc.StatusCode.INTERNAL] * 6
    entry = await client.entry("a")
    assert (entry.failures_total, entry.requests_total, entry.reason) == (6, 6, "")


async def test_before_the_first_token_another_engine_is_tried_after_an_abort(pair):
    client, engines = pair
    engines["a"].error = StatusError(UNAVAILABLE, "out of order")
    for number in range(4):
        assert await client.engine_of(f"r{number}") == "b"
    refused = [name for name, _ in engines["a"].seen]
    assert refused and set(refused) <= set(engines["a"].aborted)


async def test_attempts_are_limited_and_the_error_says_why():
    async with run_fleet("a", max_attempts=3, health={"unhealthy_after": 50}) as (client, engines):
        engines["a"].error = StatusError(UNAVAILABLE, "out of order")
        with pytest.raises(grpc.RpcError, match="3 attempts failed, the last on engine a: out of order"):
            await client.generate()
        assert len(engines["a"].seen) == 3


async def test_an_engine_lost_in_the_middle_is_an_error_and_no_second_answer():
    engine, other = Engine("a"), Engine("b")
    engine.hold_at = 1
    engine.hold.clear()
    async with serve_engine(other) as spare, run_fleet() as (client, _):
        async with serve_engine(engine) as server:
            await client.register("a", server.address)
            call = client.rollout.Generate(pb.GenerateRequest(request_id="r"))
            assert (await call.read()).engine_id == "a"
            await client.register("b", spare.address)
            await until(lambda: all_healthy(client, 2))
        with pytest.raises(grpc.RpcError, match="engine a was lost after 1 messages of request 'r'") as caught:
            await call.read()
        assert caught.value.code() is UNAVAILABLE
        assert "r" not in [name for name, _ in other.seen]
        assert await client.engine_of("r") == "b"


async def test_a_cancelled_caller_cancels_the_engine(pair):
    client, engines = pair
    for engine in engines.values():
        engine.hold_at = 1
        engine.hold.clear()
    call = client.rollout.Generate(pb.GenerateRequest(request_id="r"))
    first = await call.read()
    call.cancel()
    engine = engines[first.engine_id]
    await until(lambda: engine.cancelled == ["r"])
    await until(lambda: outstanding(client, first.engine_id, 0))


async def outstanding(client, engine_id, count):
    return (await client.entry(engine_id)).outstanding_requests == count


async def test_a_callers_deadline_ends_the_engines_work(pair):
    client, engines = pair
    for engine in engines.values():
        engine.hold.clear()
    with pytest.raises(grpc.RpcError) as caught:
        await client.generate("r", timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: sum((engine.cancelled for engine in engines.values()), []) == ["r"])


async def test_a_repeated_id_goes_to_the_same_engine(pair):
    client, engines = pair
    for number in range(6):
        first = await client.engine_of(f"r{number}")
        assert {await client.engine_of(f"r{number}") for _ in range(3)} == {first}
        await client.drain(first)
        assert await client.engine_of(f"r{number}") == first, "a repetition is nothing new to a draining engine"
        await client.drain(first, undo=True)
    with_key = await client.engine_of("x", metadata=[(keys.REQUEST_ID, "x")])
    assert await client.engine_of("x") == with_key


async def test_abort_reaches_every_engine(pair):
    client, engines = pair
    answer = await client.rollout.Abort(pb.AbortRequest(request_ids=["r1", "r2"]))
    assert answer.aborted == ["r1", "r2"]
    assert all(engine.aborted == ["r1", "r2"] for engine in engines.values())


async def test_estimated_tokens_steer_requests():
    async with run_fleet("a", "b", policy="least_outstanding_tokens") as (client, engines):
        for engine in engines.values():
            engine.hold_at = 1
            engine.hold.clear()

        async def start(tokens):
            call = client.rollout.Generate(
                pb.GenerateRequest(request_id=client.request_id()), metadata=[(keys.ESTIMATED_TOKENS, str(tokens))]
            )
            return call, (await call.read()).engine_id

        calls = [await start(tokens) for tokens in (1000, 10, 10, 10)]
        large = calls[0][1]
        assert {name for _, name in calls[1:]} == {"a", "b"} - {large}
        entry = await client.entry(large)
        assert (entry.outstanding_requests, entry.outstanding_tokens) == (1, 1000)
        for call, _ in calls:
            call.cancel()


async def test_many_concurrent_requests_leave_nothing_behind(pair):
    client, engines = pair
    answers = await asyncio.gather(*(client.generate() for _ in range(300)))
    assert all(len(answer) == 3 for answer in answers)
    entries = (await client.list()).engines
    assert [one.outstanding_requests for one in entries] == [0, 0]
    assert [one.requests_total for one in entries] == [150, 150]
