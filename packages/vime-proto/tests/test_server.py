"""What every server has, and what clients see of its errors."""

import asyncio
import os
import sys

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from vime_proto.channel import (
    LOST,
    call,
    join_address,
    open_channel,
    open_sync_channel,
    retry_delay,
    split_address,
    sync_call,
    wait_serving,
)
from vime_proto.common.v1 import common_pb2, common_pb2_grpc
from vime_proto.errors import ContractError, StatusError, describe, from_rpc_error
from vime_proto.server import AddressInUseError, ServerInfo, ServerOptions, start_server
from vime_proto.trainer.v1 import trainer_pb2 as pb
from vime_proto.trainer.v1 import trainer_pb2_grpc


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Fails as told, a number of times."""

    def __init__(self, *errors: Exception):
        self.errors, self.calls = list(errors), 0

    def _next(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    async def GetStatus(self, request, context):
        self._next()
        return pb.GetStatusResponse(step=0)

    async def StreamMetrics(self, request, context):
        yield pb.StreamMetricsResponse(metrics=pb.StepMetrics(step=0))
        self._next()

    async def SaveCheckpoint(self, request, context):
        return pb.SaveCheckpointResponse(path="x" * 100_000)


def _services(trainer):
    return [(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, trainer, "vime.trainer.v1.TrainerService")]


@pytest.fixture
async def start():
    """Starts servers, and stops them afterwards."""
    servers = []

    async def begin(trainer=None, **options):
        info = ServerInfo("vime-trainer", "trainer", "1.2", "run", {"x": "true"})
        server = await start_server(_services(trainer or Trainer()), info, ServerOptions(**options))
        servers.append(server)
        await server.set_serving(True)
        return server

    yield begin
    for server in servers:
        await server.stop(0)


def _stub(channel):
    return trainer_pb2_grpc.TrainerServiceStub(channel)


async def test_info_says_what_a_server_is(start):
    server = await start()
    async with open_channel(server.address) as channel:
        info = await common_pb2_grpc.InfoServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
        again = await common_pb2_grpc.InfoServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
    assert (info.package, info.role, info.run_id, dict(info.capabilities)) == (
        "vime-trainer",
        "trainer",
        "run",
        {"x": "true"},
    )
    assert info.contract.minimum == "1.0" and info.incarnation == again.incarnation
    assert set(info.services) == {"vime.trainer.v1.TrainerService", "vime.common.v1.InfoService"}
    other = await start()
    async with open_channel(other.address) as channel:
        assert (
            await common_pb2_grpc.InfoServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
        ).incarnation != info.incarnation


async def test_health_follows_set_serving(start):
    server = await start()
    async with open_channel(server.address) as channel:
        await wait_serving(channel, 60)
        await wait_serving(channel, 60, "vime.trainer.v1.TrainerService")
        await server.set_serving(False)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(TimeoutError, match="NOT_SERVING"):
            await wait_serving(channel, 3)


async def test_reflection_lists_the_services(start):
    server = await start()
    async with open_channel(server.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        names = [one.name async for answer in stream for one in answer.list_services_response.service]
    assert "vime.trainer.v1.TrainerService" in names and "grpc.health.v1.Health" in names


async def test_a_contract_error_arrives_with_its_violations(start):
    server = await start(Trainer(ContractError("a.b", "must not be empty", [("c", "too")])))
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await _stub(channel).GetStatus(pb.GetStatusRequest())
    status = from_rpc_error(caught.value)
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.violations == [("a.b", "must not be empty"), ("c", "too")]
    assert describe(caught.value) == "INVALID_ARGUMENT: a.b: must not be empty; c: too"


async def test_a_status_error_arrives_with_its_delay_also_from_streams(start):
    server = await start(Trainer(StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after=0.25)))
    async with open_channel(server.address) as channel:
        stream = _stub(channel).StreamMetrics(pb.StreamMetricsRequest())
        received = []
        with pytest.raises(grpc.RpcError) as caught:
            async for message in stream:
                received.append(message)
    assert len(received) == 1 and received[0].metrics.HasField("step"), "what came before the error arrived"
    assert from_rpc_error(caught.value).retry_after == 0.25


async def test_an_unexpected_error_is_internal_and_logged(start, caplog):
    server = await start(Trainer(RuntimeError("boom")))
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await _stub(channel).GetStatus(pb.GetStatusRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL and "RuntimeError: boom" in caught.value.details()
    assert "Traceback" in caplog.text


async def test_a_call_is_repeated_while_its_error_may_pass(start):
    passing = [
        StatusError(grpc.StatusCode.UNAVAILABLE, "x"),
        StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "x", retry_after=0.01),
        StatusError(grpc.StatusCode.CANCELLED, "the server stops"),
    ]
    trainer = Trainer(*passing)
    server = await start(trainer)
    async with open_channel(server.address) as channel:
        assert (await call(_stub(channel).GetStatus, pb.GetStatusRequest(), 5)).HasField("step")
    assert trainer.calls == 4


class Ended(grpc.RpcError):
    """What gRPC's own errors say, without a call."""

    def __init__(self, code):
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: "", lambda: ()


@pytest.mark.parametrize("between", [False, True], ids=["in the call", "between two calls"])
async def test_a_task_that_is_cancelled_repeats_nothing(between):
    """The server's CANCELLED comes as an error with that code, this side's own as CancelledError."""
    calls, reached = [], asyncio.Event()

    async def method(request, timeout, metadata):
        calls.append(request)
        asyncio.get_running_loop().call_soon(reached.set)
        if between:
            raise Ended(grpc.StatusCode.CANCELLED)
        await asyncio.Event().wait()

    asked = asyncio.create_task(call(method, "x", timeout=60))
    await reached.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert calls == ["x"]


_ENDING = """
import asyncio

from test_server import ServerInfo, ServerOptions, Trainer, _services, start_server


class Busy(Trainer):
    async def GetStatus(self, request, context):
        self.calls += 1
        if self.calls == 2:
            reached.set()
        await asyncio.Event().wait()


async def main():
    server = await start_server(_services(Busy()), ServerInfo("vime-trainer", "trainer"), ServerOptions())
    print(server.address, flush=True)
    await reached.wait()


reached = asyncio.Event()
asyncio.run(main())
"""


async def test_a_call_under_way_when_the_servers_process_ends_is_repeated_at_the_next_one(start):
    # Cut off by the end of its event loop, gRPC's server says CANCELLED to its calls, or leaves it at the lost connection.
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
    here = os.path.dirname(__file__)
    ending = await asyncio.create_subprocess_exec(sys.executable, "-c", _ENDING, cwd=here, **pipes)
    try:
        address = (await ending.stdout.readline()).decode().strip()
        async with open_channel(address) as channel:
            bare = asyncio.ensure_future(_stub(channel).GetStatus(pb.GetStatusRequest(), timeout=60))
            asked = asyncio.create_task(call(_stub(channel).GetStatus, pb.GetStatusRequest(), timeout=60))
            with pytest.raises(grpc.RpcError) as caught:
                await bare
            await ending.wait()
            await start(address=address)
            assert (await asked).HasField("step")
    finally:
        if ending.returncode is None:
            ending.kill()
            await ending.wait()
    assert caught.value.code() in LOST


def test_a_channel_that_another_thread_closes_ends_the_call():
    def method(request, timeout):
        if closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        closed.append(request)
        raise Ended(grpc.StatusCode.CANCELLED)

    closed = []
    with pytest.raises(Ended):
        sync_call(method, "x", timeout=60)
    with pytest.raises(ValueError, match="closed channel"):
        sync_call(method, "x", timeout=60)


def test_an_hour_without_a_server_is_no_reason_to_fail():
    assert 1.0 <= retry_delay(Ended(grpc.StatusCode.UNAVAILABLE), 5000) <= 2.0
    assert retry_delay(Ended(grpc.StatusCode.ABORTED), 0) is None
    assert retry_delay(Ended(grpc.StatusCode.ABORTED), 0, also={grpc.StatusCode.ABORTED}) > 0


@pytest.mark.parametrize("code", ["ABORTED", "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL", "RESOURCE_EXHAUSTED"])
async def test_a_final_error_is_not_repeated(start, code):
    trainer = Trainer(*[StatusError(grpc.StatusCode[code], "x")] * 3)
    server = await start(trainer)
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError):
            await call(_stub(channel).GetStatus, pb.GetStatusRequest(), 5)
    assert trainer.calls == 1


async def test_repetition_ends_at_the_deadline(start):
    trainer = Trainer(*[StatusError(grpc.StatusCode.UNAVAILABLE, "x")] * 1000)
    server = await start(trainer)
    async with open_channel(server.address) as channel:
        began = asyncio.get_running_loop().time()
        with pytest.raises(grpc.RpcError):
            await call(_stub(channel).GetStatus, pb.GetStatusRequest(), 2.0, deadline=3.0)
    assert trainer.calls > 1 and asyncio.get_running_loop().time() - began < 30


async def test_threads_repeat_calls_too(start):
    trainer = Trainer(StatusError(grpc.StatusCode.UNAVAILABLE, "x"))
    server = await start(trainer)

    def work():
        with open_sync_channel(server.address) as channel:
            return sync_call(_stub(channel).GetStatus, pb.GetStatusRequest(), 5)

    assert (await asyncio.to_thread(work)).step == 0
    assert trainer.calls == 2


async def test_a_token_guards_all_but_health(start):
    server = await start(token="secret")
    for token, allowed in ((None, False), ("wrong", False), ("secret", True)):
        async with open_channel(server.address, token=token) as channel:
            await wait_serving(channel, 60)
            request = _stub(channel).GetStatus(pb.GetStatusRequest())
            stream = _stub(channel).StreamMetrics(pb.StreamMetricsRequest())
            if allowed:
                assert (await request).step == 0 and [m async for m in stream]
                continue
            for refused in (request, stream.read()):
                with pytest.raises(grpc.RpcError) as caught:
                    await refused
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_messages_have_a_limit(start):
    server = await start(max_message_bytes=50_000)
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await _stub(channel).SaveCheckpoint(pb.SaveCheckpointRequest(request_id="r"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_large_message_passes_by_default(start):
    server = await start()
    async with open_channel(server.address) as channel:
        answer = await _stub(channel).SaveCheckpoint(pb.SaveCheckpointRequest(request_id="r" * (8 << 20)))
    assert len(answer.path) == 100_000


async def test_a_port_in_use_is_named(start):
    server = await start()
    with pytest.raises(AddressInUseError, match=server.address):
        await start(address=server.address)


@pytest.mark.parametrize("name", ["vime.trainer.v1.TrainerService", "grpc.health.v1.Health", "vime.common.v1.InfoService"])
async def test_a_service_that_is_registered_twice_is_refused_by_name(name):
    again = (trainer_pb2_grpc.add_TrainerServiceServicer_to_server, Trainer(), name)
    with pytest.raises(ContractError, match=f"registered twice: {name}"):
        await start_server([*_services(Trainer()), again], ServerInfo("vime-trainer", "trainer"))


async def test_half_a_tls_pair_and_one_that_is_not_there_are_refused(start, tmp_path):
    key = str(tmp_path / "key")
    with pytest.raises(ContractError, match="tls"):
        await start(tls_key=key)
    with pytest.raises(FileNotFoundError, match=f"tls_key: cannot read '{key}': No such file"):
        await start(tls_key=key, tls_certificate=key)


async def test_proxy_variables_are_not_followed(start, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = await start()
    async with open_channel(server.address) as channel:
        assert (await _stub(channel).GetStatus(pb.GetStatusRequest(), timeout=30)).step == 0


async def test_ipv6_hosts_are_bracketed(start):
    try:
        server = await start(address="[::1]:0")
    except AddressInUseError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    assert server.address.startswith("[::1]:")
    async with open_channel(server.address) as channel:
        assert (await _stub(channel).GetStatus(pb.GetStatusRequest(), timeout=30)).step == 0


@pytest.mark.parametrize(
    ("host", "port", "text"), [("127.0.0.1", 5, "127.0.0.1:5"), ("::1", 5, "[::1]:5"), ("a.b", 0, "a.b:0")]
)
def test_addresses_are_joined_and_split(host, port, text):
    assert join_address(host, port) == text and split_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", ":5", "::1:5", "host:x", "host:99999", "[::1]", "host:"])
def test_other_addresses_are_refused(text):
    with pytest.raises(ContractError, match="host:port"):
        split_address(text)


async def test_starting_and_stopping_many_times_leaves_nothing(start):
    for _ in range(20):
        server = await start_server(_services(Trainer()), ServerInfo("p", "r"), ServerOptions())
        await server.stop(0)
        async with open_channel(server.address) as channel:
            with pytest.raises(grpc.RpcError):
                await _stub(channel).GetStatus(pb.GetStatusRequest(), timeout=1)


async def test_a_token_passes_streams_of_requests():
    from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
    from vime_proto.checksum import checksum
    from vime_proto.fakes import FakeBuffer, serve

    fake = FakeBuffer()
    async with (
        serve(fake, ServerOptions(token="secret")) as server,
        open_channel(server.address, token="secret") as channel,
    ):
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        message = buffer_pb2.PutBlobRequest(run_id="r", request_id="q", data=b"x", checksum=checksum(b"x"))
        with pytest.raises(grpc.RpcError) as caught:
            await stub.PutBlob(iter([message]))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND, "past the token check: the run is unknown"
