"""TLS towards callers, mutual TLS towards engines."""

from __future__ import annotations

import shutil

import grpc
import pytest
from conftest import Client, run_router
from scripted import Engine, serve_engine

from vime_proto import fakes
from vime_proto.channel import open_channel
from vime_proto.server import ServerOptions
from vime_router import RouterSettings, serve


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    return fakes.certificate(tmp_path / "tls")


async def test_tls_on_both_sides(certificate):
    cert, key = certificate
    options = ServerOptions(tls_certificate=cert, tls_key=key, tls_client_ca=cert)
    async with serve_engine(Engine("a"), options=options) as engine:
        settings = RouterSettings(
            engines=[{"id": "a", "address": engine.address}],
            engine_tls={"ca": cert, "certificate": cert, "key": key},
            server={"tls_certificate": cert, "tls_key": key},
        )
        async with serve(settings) as router:
            async with open_channel(router.address, tls_ca=cert) as channel:
                assert await Client(channel, router.address).engine_of() == "a"
            async with open_channel(router.address) as channel:
                with pytest.raises(grpc.RpcError):
                    await Client(channel, router.address).generate()


async def test_an_engine_that_cannot_be_trusted_gets_nothing(certificate):
    cert, key = certificate
    async with serve_engine(Engine("a"), options=ServerOptions(tls_certificate=cert, tls_key=key)) as engine:
        async with run_router({"a": engine.address}, queue_timeout_seconds=0.5) as client:
            with pytest.raises(grpc.RpcError, match="no engine took the request"):
                await client.generate()
