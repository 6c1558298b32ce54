"""The command, as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from conftest import Client, until
from scripted import Engine, serve_engine

from vime_proto.channel import open_channel, wait_serving
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.server import ServerOptions

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "vime_router", *words]


def finish(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*words), env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


class Process:
    """A process whose first line of output holds an address; killed when the context ends."""

    def __init__(self, words: list[str]):
        self._words = words

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            *self._words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        line = (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode().strip()
        assert line, (await self.process.stderr.read()).decode()
        self.address = line.removeprefix("listening on ")
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@pytest.fixture
def engine_process():
    return lambda name: Process([sys.executable, str(Path(__file__).with_name("scripted.py")), name])


async def test_a_stop_right_after_the_address_is_known_is_a_clean_one(tmp_path):
    address_file = tmp_path / "address"
    async with Process(command("serve", "--address-file", str(address_file))) as router:
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 60) == 0


async def test_serve_list_and_stop(tmp_path):
    config = tmp_path / "router.toml"
    address_file = tmp_path / "address"
    async with serve_engine(Engine("a")) as engine:
        config.write_text(
            f'policy = "round_robin"\naddress_file = "{address_file}"\n'
            f'[[engines]]\nid = "a"\naddress = "{engine.address}"\n[health]\ninterval_seconds = 0.1\n'
        )
        async with (
            Process(command("serve", "--config", str(config))) as router,
            open_channel(router.address) as channel,
        ):
            await wait_serving(channel, 60)
            assert address_file.read_text() == router.address
            client = Client(channel, router.address)
            assert await client.engine_of() == "a"
            shown = await asyncio.to_thread(finish, "list", "--address", router.address)
            assert shown.returncode == 0, shown.stderr
            assert shown.stdout.splitlines()[0] == "policy round_robin, 0 queued"
            assert shown.stdout.splitlines()[2].split("\t")[:4] == ["a", engine.address, "healthy", "run/0:1"]
            begin = time.monotonic()
            router.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(router.process.wait(), 60) == 0
            assert time.monotonic() - begin < 20


async def test_stopping_does_not_wait_for_requests():
    async with Process(command("serve")) as router, open_channel(router.address) as channel:
        call = Client(channel, router.address).rollout.Generate(pb.GenerateRequest(request_id="r"))
        waiting = asyncio.create_task(call.read())
        client = Client(channel, router.address)
        await until(lambda: queued(client))
        router.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(router.process.wait(), 30) == 0
        with pytest.raises(grpc.RpcError):
            await waiting


async def queued(client):
    return (await client.list()).queued == 1


async def test_an_engine_that_is_killed_in_the_middle(engine_process):
    async with (
        engine_process("a") as engine,
        Process(command("serve")) as router,
        open_channel(router.address) as channel,
    ):
        client = Client(channel, router.address)
        await client.register("a", engine.address)
        call = client.rollout.Generate(pb.GenerateRequest(request_id="r"))
        await call.read()
        await call.read()
        engine.process.kill()
        with pytest.raises(grpc.RpcError, match="engine a was lost after 2 messages of request 'r'") as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_with_a_token_and_engines_with_another(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("router-token\n")
    theirs.write_text("engine-token\n")
    options = ServerOptions(token="engine-token")
    async with serve_engine(Engine("a"), options=options) as engine:
        words = ["serve", "--server.token-file", str(ours), "--engine-token-file", str(theirs)]
        async with Process(command(*words, "--engines", f'[{{id="a", address="{engine.address}"}}]')) as router:
            async with open_channel(router.address) as channel:
                client = Client(channel, router.address)
                assert await client.engine_of(metadata=[("authorization", "Bearer router-token")]) == "a"
                with pytest.raises(grpc.RpcError) as caught:
                    await client.generate()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            shown = await asyncio.to_thread(
                finish, "list", "--address", router.address, "--token-file", str(ours), "--refresh"
            )
            assert "healthy" in shown.stdout, shown.stderr


async def test_metrics(tmp_path, unused_tcp_port):
    async with serve_engine(Engine("a")) as engine:
        words = [
            "serve",
            "--engines",
            f'[{{id="a", address="{engine.address}"}}]',
            "--metrics-port",
            str(unused_tcp_port),
        ]
        async with Process(command(*words)) as router, open_channel(router.address) as channel:
            await Client(channel, router.address).generate()
            url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            text = (await asyncio.to_thread(opener.open, url)).read().decode()
            second = await asyncio.to_thread(finish, "serve", "--metrics-port", str(unused_tcp_port))
            assert second.returncode == 1
            assert f"metrics_port: cannot listen on 127.0.0.1:{unused_tcp_port}: Address already in use" in second.stderr
    lines = text.splitlines()
    assert 'vime_router_requests_total{engine="a"} 1.0' in lines
    assert 'vime_router_engine_health{engine="a",health="healthy"} 1.0' in lines
    assert "vime_router_queued 0.0" in lines


def test_help_lists_the_commands():
    for words in ((), ("serve",)):
        shown = finish(*words, "--help")
        assert shown.returncode == 0 and shown.stdout.startswith("usage: vime-router")


def test_version(capsys):
    from vime_router import __version__, cli

    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["serve", "--policy", "round-robin"], 2, "unknown policy 'round-robin'; did you mean 'round_robin'?"),
        (["serve", "--polici", "x"], 2, "unknown key 'polici'; did you mean 'policy'?"),
        (["serve", "--server.address", "nowhere"], 1, "'nowhere' is not host:port"),
        (["serve", "--engines", '[{id="a", address="h:1"}, {id="a", address="h:2"}]'], 2, "given twice: a"),
        (["serve", "--engines", '[{id="a", address="h:0"}]'], 2, "needs a port"),
        (["serve", "--engines", '[{id="a", address="h"}]'], 2, "serve: engines.0.address: address: 'h' is not host:port"),
        (["serv"], 2, "unknown command 'serv'; did you mean 'serve'?"),
        (["list", "--address", "127.0.0.1:1"], 1, "UNAVAILABLE"),
    ],
)
def test_wrong_words_end_with_one_clear_line(words, status, message):
    result = finish(*words)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1


async def test_a_port_in_use_is_named():
    async with serve_engine(Engine("a")) as engine:
        result = await asyncio.to_thread(finish, "serve", "--server.address", engine.address)
    assert result.returncode == 1
    assert f"cannot listen on {engine.address}" in result.stderr and "Traceback" not in result.stderr


def test_print_config_shows_the_whole():
    result = finish("serve", "--print-config", "--health.interval-seconds", "3")
    assert json.loads(result.stdout)["health"]["interval_seconds"] == 3.0
