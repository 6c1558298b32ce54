"""The table [client]: tokens and TLS for what the trainer calls."""

import shutil

import grpc
import pytest
from fleet import holds, send

from vime_proto import fakes
from vime_proto.errors import describe
from vime_proto.fakes import FakeBuffer, FakeEngine, FakeRouter, serve
from vime_proto.rollout.v1.rollout_pb2 import GetStatusRequest
from vime_proto.rollout.v1.rollout_pb2_grpc import EngineControlServiceStub
from vime_proto.router.v1.router_pb2 import EngineEntry
from vime_proto.server import ServerOptions
from vime_trainer.publish import Publisher, WeightsSettings
from vime_trainer.rl import RlSettings
from vime_trainer.rl._peers import check_peer
from vime_trainer.settings.client import ClientSettings


async def test_the_token_of_a_file_is_sent(tmp_path, caplog):
    (tmp_path / "token").write_text("secret\n")
    client = ClientSettings(token_file=str(tmp_path / "token"))
    async with serve(FakeBuffer(), ServerOptions(token="secret")) as server:
        await check_peer("buffer", server.address, "run", 0, client.open)
        with pytest.raises(grpc.RpcError) as error:
            await check_peer("buffer", server.address, "run", 0)
        assert describe(error.value).startswith("UNAUTHENTICATED")
        assert f"buffer at {server.address}: UNAUTHENTICATED" in caplog.text


def test_a_missing_file_is_named(tmp_path):
    settings = RlSettings(
        model="m", output="o", buffer="h:1", router="h:2", client={"token_file": str(tmp_path / "nowhere")}
    )
    with pytest.raises(FileNotFoundError, match="nowhere"):
        settings.client.open("h:1")


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    return fakes.certificate(tmp_path / "tls")


async def test_everybody_that_the_trainer_calls_may_ask_for_tls_and_its_certificate(certificate, tmp_path):
    cert, key = certificate
    (tmp_path / "token").write_text("secret\n")
    table = {"tls_ca": cert, "tls_certificate": cert, "tls_key": key, "token_file": str(tmp_path / "token")}
    client = RlSettings(model="m", output="o", buffer="h:1", router="h:2", client=table).client
    options = ServerOptions(tls_certificate=cert, tls_key=key, tls_client_ca=cert, token="secret")
    engine = FakeEngine("engine")
    async with (
        serve(FakeBuffer(), options) as buffer,
        serve(FakeRouter(), options) as router,
        serve(engine, options) as served,
    ):
        await check_peer("buffer", buffer.address, "run", 0, client.open)
        await check_peer("router", router.address, "run", 0, client.open)

        class Listed:  # a fake router looks for engines without TLS
            async def at_least(self, count, timeout):
                return [EngineEntry(engine_id="engine", address=served.address)]

        settings = WeightsSettings(transport="stream", chunk_bytes=600, attempts=1, retry_seconds=0.5)
        publisher = Publisher("run", Listed(), settings, client.open)
        try:
            assert (await send(publisher, 1)).engines == ["engine"]
        finally:
            await publisher.close()
        holds(engine, 1, 1)
        # Without this client's certificate nobody answers.
        strange = ClientSettings(tls_ca=cert, token_file=table["token_file"])
        with pytest.raises(grpc.RpcError) as error:
            async with strange.open(served.address) as channel:
                await EngineControlServiceStub(channel).GetStatus(GetStatusRequest(), timeout=10)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
