"""The command line and the process around the service."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from client import Client

from vime_proto.channel import open_channel, wait_serving
from vime_proto.common.v1 import common_pb2, common_pb2_grpc


def _run(*arguments):
    return subprocess.run([sys.executable, "-m", "vime_buffer", *arguments], capture_output=True, text=True, timeout=60)


async def test_serve_listens_tells_its_address_and_stops_cleanly(process):
    server = process()
    assert server.address_file.read_text() == server.address
    channel = open_channel(server.address)
    await wait_serving(channel, 60)
    info = await common_pb2_grpc.InfoServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
    assert (info.package, info.role) == ("vime-buffer", "buffer")
    assert "vime.buffer.v1.BufferService" in info.services
    await channel.close()
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait(30) == 0


async def test_stop_does_not_wait_for_long_polls(process):
    import asyncio

    server = process()
    client = await Client.connect(server.address)
    await client.open()
    waiting = asyncio.ensure_future(client.lease(wait=60))
    await asyncio.sleep(0.1)
    server.child.send_signal(signal.SIGINT)
    await asyncio.wait([waiting], timeout=30)
    assert waiting.done()
    assert await asyncio.to_thread(server.child.wait, 30) == 0
    waiting.exception()
    await client.close()


def test_version(capsys):
    from vime_buffer import __version__, cli

    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


async def test_stats_prints_the_counters(process):
    server = process()
    client = await Client.connect(server.address)
    await client.open(batch_groups=3)
    await client.close()
    answer = _run("stats", "--address", server.address, "--run-id", "run")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["capacity"] == "3"
    answer = _run("stats", "--address", server.address, "--run-id", "nobody")
    assert answer.returncode == 1 and "nobody" in answer.stderr and len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, code, texts",
    [
        (["serv"], 2, ["did you mean 'serve'"]),
        ([], 2, []),
        (["serve", "--group-fitler", "none"], 2, ["did you mean 'group_filter'"]),
        (["serve", "--group-filter", "nonzero"], 2, ["did you mean 'nonzero_std'"]),
        (["serve", "--group", "none"], 2, ["unknown key 'group'"]),
        (
            ["serve", "--prompts", '[{path = "/nowhere.jsonl"}]', "--database", "{tmp}/x.db"],
            1,
            ["prompts[0].path", "/nowhere.jsonl"],
        ),
        (["serve", "--database", "/"], 1, ["database /", "unable to open"]),
        (["serve", "--lease-ttl-seconds", "0"], 2, ["lease_ttl_seconds"]),
        (["serve", "--server.address", "nowhere", "--database", "{tmp}/x.db"], 1, ["'nowhere' is not host:port"]),
        (["serve", "--database", "/proc/no/x.db"], 1, ["database: cannot write /proc/no/x.db"]),
        (["serve", "--database", "{tmp}/x.db", "--blobs", "/proc/no/x"], 1, ["blobs: cannot make '/proc/no/x'"]),
        (["serve", "--database", "{tmp}/x.db", "--blobs", "weird://x"], 1, ["blobs: 'weird://x': Protocol not known"]),
    ],
)
def test_bad_configuration_gives_one_clear_line(arguments, code, texts, tmp_path):
    answer = _run(*(one.replace("{tmp}", str(tmp_path)) for one in arguments))
    assert answer.returncode == code
    for text in texts:
        assert text in answer.stderr
    if texts:
        assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = _run("serve", "--server.address", f"127.0.0.1:{port}", "--database", str(tmp_path / "x.db"))
    assert answer.returncode == 1 and str(port) in answer.stderr.splitlines()[-1]


def test_print_config_shows_the_whole(tmp_path, jsonl):
    config = tmp_path / "buffer.toml"
    config.write_text(
        f'database = "{tmp_path}/x.db"\n[[prompts]]\npath = "a.jsonl"\ntext_field = "q"\n'
        '[evaluation.held]\npath = "b.jsonl"\nrollouts_per_prompt = 2\nsampling = {temperature = 0}\n'
    )
    answer = _run("serve", "--config", str(config), "--print-config", "--lease-ttl-seconds", "7")
    shown = json.loads(answer.stdout)
    assert shown["lease_ttl_seconds"] == 7 and shown["prompts"][0]["text_field"] == "q"
    assert shown["evaluation"]["held"]["rollouts_per_prompt"] == 2 and shown["group_filter"] == "none"


async def test_metrics_are_served_from_rows(start, tmp_path):
    async with start(metrics_port=0, group_filter="nonzero_std") as client:
        await client.open(batch_groups=3)
        await client.put("a")
        await client.commit((await client.lease()).leases[0], rewards=[1.0])
        url = f"http://127.0.0.1:{client.server.metrics.port}/metrics"

        def read():
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=10) as answer:
                return answer.read().decode()

        import asyncio

        text = await asyncio.to_thread(read)
        assert 'vime_buffer_capacity{run="run"} 3.0' in text
        assert 'vime_buffer_groups_filtered_total{reason="zero_std",run="run"} 1.0' in text
        assert 'vime_buffer_groups_committed_total{run="run"} 1.0' in text
        assert 'vime_buffer_version{run="run"} 0.0' in text
        port = client.server.metrics.port
        with pytest.raises(OSError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use"):
            async with start(metrics_port=port, database=str(tmp_path / "other.db")):
                pass


async def test_start_and_stop_many_times(start):
    for number in range(20):
        async with start() as client:
            answer = await client.open()
            assert answer.existed == (number > 0)
