"""The command: configuration, signals, death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest
from worker_models import RUN, STOP, answering, delta, until

from vime_proto.sample.v1 import sample_pb2 as pb


async def start(one, *arguments: str, **environment: str):
    settings = {key: one.settings[key] for key in ("run_id", "buffer", "rollout", "tokenizer")}
    options = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vime_rollout", "worker", *options, "--sampling.max-new-tokens", "16", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip


async def halting(request, seen):
    yield delta([10, 11], 0)
    await asyncio.sleep(60)


async def test_it_works_behind_proxy_variables_and_ends_with_the_run(stage, prompts):
    one = await stage(answering([5, 2]), prompts[:2])
    await one.open_run()
    dead = "http://127.0.0.1:9"
    worker = await start(one, http_proxy=dead, https_proxy=dead, grpc_proxy=dead, HTTP_PROXY=dead, no_proxy="")
    assert len((await one.batch(30)).groups) == 2
    await one.close_run()
    _, errors = await asyncio.wait_for(worker.communicate(), 20)
    assert worker.returncode == 0, errors.decode()


async def test_sigterm_gives_leases_back_within_five_seconds(stage, prompts):
    one = await stage(halting, prompts[:1])
    await one.open_run(batch_groups=1)
    worker = await start(one)
    await until(lambda: one.engine.running == 2)
    await asyncio.sleep(0.2)
    worker.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(worker.communicate(), 30)
    assert worker.returncode == 0, errors.decode()
    run = one.buffer.store.runs[RUN]
    assert not run.leases
    (row,) = run.prompts.values()
    assert [len(partial.samples[0].segments) for partial in row.partial] == [2, 2]


async def test_a_killed_worker_leaves_no_process_and_its_successor_no_wait(stage, prompts, tmp_path):
    (tmp_path / "busy_reward.py").write_text(
        "import os, pathlib\n"
        "def score(item):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    return float(9 ** 9 ** 9 % 2)\n"
    )
    one = await stage(answering([5, 2]), prompts[:1], ttl=600.0)
    await one.open_run(batch_groups=1)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    worker = await start(one, "--reward", "busy_reward:score", "--reward-workers", "1", PYTHONPATH=path)
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    worker.kill()
    await worker.communicate()

    def gone():
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    await until(gone)
    successor = await start(one)
    (group,) = await one.groups(await one.batch(30))
    assert [rollout.attempt for rollout in group.rollouts] == [2, 2]
    successor.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(successor.wait(), 10) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--max-group-in-flight", "3"], 2, "did you mean 'max_groups_in_flight'"),
        (["--sampling.temprature", "1"], 2, "did you mean 'temperature'"),
        (["--sampling.temperature", "0"], 2, "sampling.temperature"),
        (["--reward", "exat"], 1, "did you mean 'exact'"),
        (["--rewards.exact.ignore_cases", "true"], 1, "did you mean 'ignore_case'"),
        (["--reward", "math:nothing"], 1, "cannot find"),
        (["--environment", "no_such:Thing"], 1, "cannot import 'no_such'"),
        (["--tokenizer", "/nowhere"], 1, "tokenizer: /nowhere/tokenizer.json does not exist"),
        (["--buffer", "nowhere"], 2, "'nowhere' is not host:port"),
    ],
)
async def test_a_wrong_configuration_is_one_clear_line(stage, prompts, arguments, status, message):
    one = await stage(answering([5, 2]), prompts)
    worker = await start(one, *arguments)
    _, errors = await asyncio.wait_for(worker.communicate(), 30)
    lines = [line for line in errors.decode().splitlines() if line.startswith("vime-rollout worker: ")]
    assert worker.returncode == status and len(lines) == 1, errors.decode()
    assert message == "cannot find" or message in lines[0]


async def test_the_resolved_configuration_is_printed(stage, prompts, tmp_path):
    config = tmp_path / "worker.toml"
    config.write_text(
        'reward = "close"\n[rewards.close]\nfunction = "numeric"\nrelative_tolerance = 0.1\n[sampling]\ntop_k = 5\n'
    )
    one = await stage(answering([5, 2]), prompts)
    worker = await start(one, "--config", str(config), "--print-config")
    output, errors = await asyncio.wait_for(worker.communicate(), 30)
    shown = json.loads(output)
    assert worker.returncode == 0, errors.decode()
    assert shown["rewards"] == {"close": {"function": "numeric", "relative_tolerance": 0.1}}
    assert shown["sampling"]["top_k"] == 5 and shown["sampling"]["max_new_tokens"] == 16


async def test_ipv6_addresses_work(stage, prompts):
    import socket

    from worker_models import ScriptedEngine

    from vime_proto.fakes import serve
    from vime_proto.server import ServerOptions

    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")

    async def script(request, seen):
        yield delta([5, 2], 0, STOP)

    one = await stage(script, prompts[:2])
    await one.open_run()
    async with serve(ScriptedEngine(script), ServerOptions(address="[::1]:0")) as engine:
        assert engine.address.startswith("[::1]:")
        one.worker(rollout=engine.address)
        batch = await one.batch()
        one.stop.set()
        for group in await one.groups(batch):
            assert all(rollout.status == pb.ROLLOUT_STATUS_COMPLETED for rollout in group.rollouts)
