"""Processes: refusals at start, and what is left when something is killed. (A clean stop is checked where fixtures end.)"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import models
import numpy as np
import pytest
from conftest import running

PROMPT = [1, 5, 9, 17, 33, 40, 8]


def descendants(pid):
    """Process ids below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except FileNotFoundError:
        return False


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        threading.Event().wait(0.05)


@pytest.fixture(scope="module")
def brief():
    """An engine that is killed; started first, so that it loads while others do."""
    with running("brief", models.config(), 3, wait=False) as process:
        yield process


@pytest.fixture(scope="module")
def fresh(brief):
    """An engine started on other weights."""
    with running("fresh", models.config(moe=True), 7, "--engine-id", "fresh") as process:
        yield process


def test_updated_weights_equal_a_fresh_engine_to_the_last_bit(moe, fresh):
    expected = fresh.generate(PROMPT, 32, ignore_eos=True)
    for chunks in (1, 3, 1):
        moe.pusher().push(models.weights(moe.config, 7), moe.next_version(), chunks)
        answer = moe.generate(PROMPT, 32, ignore_eos=True)
        assert answer.tokens == expected.tokens and np.array_equal(answer.logprobs, expected.logprobs)
    moe.pusher().push(moe.tensors, moe.next_version())


def test_a_dead_core_ends_the_process_with_one_clear_line(fresh):
    stream = fresh.stream(PROMPT, 200, ignore_eos=True)
    next(stream)
    children = descendants(fresh.process.pid)
    (core,) = (pid for pid in children if b"EngineCor" in (Path("/proc") / str(pid) / "comm").read_bytes())
    os.kill(core, signal.SIGKILL)
    assert fresh.process.wait(60) == 1
    lines = [line for line in fresh.log.read_text().splitlines() if line.startswith("vime-rollout engine:")]
    assert lines == ["vime-rollout engine: vLLM's engine core has ended; the engine cannot go on"]
    with pytest.raises(grpc.RpcError) as error:
        list(stream)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    until(lambda: not any(alive(pid) for pid in children), 60)


def test_a_killed_engine_leaves_no_process_behind(brief):
    brief.connect()
    children = descendants(brief.process.pid)
    assert len(children) >= 2
    brief.process.kill()
    brief.process.wait(60)
    until(lambda: not any(alive(pid) for pid in children), 60)


def test_a_stop_while_loading_takes_effect_at_once(tmp_path):
    cfg = models.config()
    models.save(tmp_path, cfg, models.weights(cfg, 1))
    command = [sys.executable, "-m", "vime_rollout", "engine", "--model", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: descendants(process.pid) or process.poll() is not None, 60)
    children = descendants(process.pid)
    process.terminate()
    assert process.wait(30) == 0
    until(lambda: not any(alive(pid) for pid in children), 60)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "/nowhere"], "/nowhere/config.json"),
        (["--model", "MODEL", "--route-capture"], "no routed experts"),
        (["--model", "MODEL", "--max-model-len", "1000"], "max_position_embeddings"),
        (["--model", "MODEL", "--rout-capture=true"], "did you mean 'route_capture'"),
        (["--model", "MODEL", "--dtype", "float8"], "dtype"),
        (["--model", "MODEL", "--weights", "trainer"], "weights: address: 'trainer' is not host:port"),
        (["--model", "MODEL", "--vllm.seed", "1"], "is set by the key 'seed'"),
        (["--model", "MODEL", "--weights-tls-ca", "/nowhere.pem"], "weights_tls_ca: there is no file"),
    ],
)
def test_what_cannot_work_is_said_before_loading(tmp_path, options, text):
    cfg = models.config()
    models.save(tmp_path, cfg, models.weights(cfg, 1))
    command = [
        sys.executable,
        "-m",
        "vime_rollout",
        "engine",
        *(str(tmp_path) if one == "MODEL" else one for one in options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and text in done.stderr and "Traceback" not in done.stderr
