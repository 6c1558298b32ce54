"""Start and end of runs, with stages of nothing but their process. Each test is a launcher of its own, as a user starts it.

Those that are about what a launcher leaves behind start a Ray cluster of their own, too; the others share one, at its address.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_support import stage_command

from vime_launch.process_tree import tree
from vime_launch.reaper import started as start_time

pytestmark = pytest.mark.ray
# On a machine that has nothing else to do.
TEN_SECONDS = 30
ENDLESS = {"config": {"steps": 0}}


def wait_until(condition, seconds: float = 60.0, process: subprocess.Popen | None = None):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time allowed"
        assert process is None or process.poll() is None, "the launcher ended"
        time.sleep(0.05)


def up(recipes, process):
    wait_until(lambda: "every stage is up" in recipes.output, 90, process)


def gone(recipes, seconds: float = 30.0):
    """Everything that the run started has ended within ``seconds``."""
    wait_until(lambda: not recipes.processes(), seconds)


def test_a_run_ends_with_its_trainer_and_leaves_its_folder(recipes):
    process = recipes.start(own_ray=True)
    assert process.wait(90) == 0, recipes.output
    summary = json.loads((recipes.run / "summary.json").read_text())
    assert summary["status"] == 0 and summary["steps"] == 5
    assert summary["logprob_abs_diff_max"] == pytest.approx(5e-7)
    assert summary["peak_rss_gib"] > 0.1
    assert (recipes.run / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert len((recipes.run / "metrics.jsonl").read_text().splitlines()) == 5
    assert "step 5  reward 0.800" in recipes.output
    gone(recipes)

    # The folder of a run is never written over by another one.
    again = subprocess.run(
        [sys.executable, "-m", "vime_launch", "run", str(recipes.folder / "recipe.toml")], capture_output=True, text=True
    )
    assert again.returncode == 2 and "--resume" in again.stderr


@pytest.mark.parametrize("kind", ["buffer", "engine", "worker", "trainer"])
def test_a_stage_that_dies_ends_the_run_with_its_last_lines(recipes, kind):
    dies = {"config": {"steps": 0, "die_after": 6.0 if kind == "buffer" else 1.5, "exit_status": 7}}
    stages = {"trainer": ENDLESS} | {kind: dies}
    process = recipes.start(**stages)
    assert process.wait(90) == 7, recipes.output
    name = kind if kind in ("buffer", "trainer") else f"{kind}-0"
    assert f"{name} ended with exit status 7" in recipes.output
    assert f"test-{kind}: gives up on purpose" in recipes.output
    gone(recipes)
    assert json.loads((recipes.run / "summary.json").read_text())["status"] == 7


def test_a_killed_stage_ends_the_run_within_ten_seconds(recipes):
    process = recipes.start(own_ray=True, trainer=ENDLESS, engine={"config": {"child": str(recipes.folder)}})
    up(recipes, process)
    guard, worker = sorted(pid for pid in recipes.processes() if "worker" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(worker, signal.SIGKILL)
    started = time.monotonic()
    assert process.wait(60) == 137, recipes.output
    gone(recipes)
    assert time.monotonic() - started < TEN_SECONDS
    assert "worker-0 ended with exit status 137" in recipes.output


def test_a_worker_that_leaves_early_with_status_0_still_ends_the_run(recipes):
    process = recipes.start(trainer=ENDLESS, worker={"config": {"die_after": 1.0, "exit_status": 0}})
    assert process.wait(90) == 1, recipes.output
    assert "worker-0 ended with exit status 0" in recipes.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything_within_ten_seconds(recipes, number):
    engine = {"config": {"stubborn": True, "child": str(recipes.folder)}}
    process = recipes.start(own_ray=number == signal.SIGINT, trainer=ENDLESS, engine=engine)
    up(recipes, process)
    started = time.monotonic()
    os.kill(process.pid, number)
    assert process.wait(60) == 130, recipes.output
    gone(recipes)
    assert time.monotonic() - started < TEN_SECONDS
    assert "killed: still running" in (recipes.run / "logs/engine-0.log").read_text()


def test_nothing_is_left_when_the_launcher_itself_is_killed(recipes):
    engine = {"config": {"stubborn": True, "child": str(recipes.folder)}}
    process = recipes.start(own_ray=True, trainer=ENDLESS, engine=engine)
    up(recipes, process)
    family = {seen.pid: seen.started for seen in tree(process.pid) if seen.pid != process.pid}
    assert len(family) > 10
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(start_time(pid) == started for pid, started in family.items()), 60)
        gone(recipes)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_worker_is_started_again_as_often_as_the_recipe_says(recipes):
    once = str(recipes.folder / "once")
    worker = {"restart": 1, "config": {"die_after": 0.5, "once": once}}
    process = recipes.start(worker=worker, trainer=ENDLESS)
    wait_until(lambda: "started again (0 restarts left)" in recipes.output, 90, process)
    up(recipes, process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130


def test_an_engine_is_started_again_where_it_was(recipes):
    once = str(recipes.folder / "once")
    process = recipes.start(engine={"restart": 1, "config": {"die_after": 1.0, "once": once}}, trainer=ENDLESS)
    line = "engine-0: test-engine 0 serves at "
    wait_until(lambda: recipes.output.count(line) == 2, 90, process)
    addresses = {one.partition(line)[2] for one in recipes.output.splitlines() if line in one}
    assert len(addresses) == 1
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130


def test_an_engine_that_dies_before_it_serves_is_started_again(recipes):
    once = str(recipes.folder / "once")
    engine = {"restart": 1, "config": {"ready_after": 0.2, "die_after": 0.0, "once": once}}
    process = recipes.start(engine=engine)
    assert process.wait(90) == 0, recipes.output
    assert recipes.output.count("started again") == 1


def test_restarts_are_counted(recipes):
    process = recipes.start(worker={"restart": 2, "config": {"die_after": 0.2}}, trainer=ENDLESS)
    assert process.wait(90) == 3, recipes.output
    assert recipes.output.count("started again") == 2


def test_a_port_in_use_is_one_clear_error(recipes):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = recipes.start(router={"config": {"server": {"address": address}}})
        assert process.wait(60) == 1, recipes.output
    assert "router ended with exit status 1" in recipes.output and f"cannot listen on {address}" in recipes.output


def test_contract_versions_that_do_not_meet_are_refused_by_name(recipes):
    process = recipes.start(router={"config": {"contract": ["2.0", "2.1"]}})
    assert process.wait(60) == 1, recipes.output
    assert "buffer (test-buffer" in recipes.output and "router (test-router" in recipes.output
    assert "share no version" in recipes.output
    gone(recipes)


def test_each_engine_gets_its_own_devices_in_numeric_order(recipes):
    process = recipes.start(engine={"count": 2, "gpus": 6}, trainer={"ranks": 2, "gpus": 2})
    assert process.wait(90) == 0, recipes.output
    devices = [(recipes.run / f"logs/engine-{index}.log").read_text().split()[1] for index in range(2)]
    given = [[int(one) for one in text.split(",")] for text in devices]
    assert all(one == sorted(one) for one in given)
    # A rank of the trainer has as many as its table says.
    ranks = [int(one) for one in (recipes.run / "logs/trainer.log").read_text().split()[1].split(",")]
    assert len(ranks) == 4 and ranks == sorted(ranks)
    assert given[0] + given[1] == list(range(12)) and sorted(given[0] + given[1] + ranks) == list(range(16))


def test_more_devices_than_there_are_is_refused_by_name(recipes):
    process = recipes.start(engine={"count": 2, "gpus": 9, "start_seconds": 3.0})
    assert process.wait(90) == 1, recipes.output
    assert "engine: the cluster has no room" in recipes.output and "16 GPUs in all" in recipes.output


def test_a_slow_start_is_waited_for_as_long_as_the_recipe_says(recipes):
    process = recipes.start(engine={"config": {"ready_after": 4.0}})
    assert process.wait(90) == 0, recipes.output


def test_a_start_that_takes_too_long_names_the_stage_and_the_key(recipes):
    process = recipes.start(engine={"start_seconds": 1.0, "config": {"ready_after": 60.0}})
    assert process.wait(60) == 1, recipes.output
    assert "engine-0 at" in recipes.output and "not serving within 1 s" in recipes.output


def test_a_command_that_cannot_be_started(recipes):
    process = recipes.start(buffer={"command": ["/nowhere/to/be/found"]})
    assert process.wait(60) == 127, recipes.output
    assert "cannot start /nowhere/to/be/found" in recipes.output


def test_processes_that_run_elsewhere_are_used_and_left_alone(recipes):
    """The start matrix: every server external, then the launcher's own trainer."""
    outside, addresses = [], {}
    try:
        for kind in ("buffer", "router", "engine"):
            file = recipes.folder / f"{kind}.address"
            config = recipes.folder / f"{kind}.toml"
            config.write_text(f'address_file = "{file}"\n[server]\naddress = "127.0.0.1:0"\n')
            outside.append(subprocess.Popen([*stage_command(kind), "--config", str(config)]))
            wait_until(file.exists)
            addresses[kind] = file.read_text()
        stages = {kind: {"command": [], "address": at} for kind, at in addresses.items()}
        process = recipes.start(**stages)
        assert process.wait(90) == 0, recipes.output
        assert all(one.poll() is None for one in outside)
        text = (recipes.run / "stages/trainer.toml").read_text()
        assert addresses["buffer"] in text and addresses["router"] in text
    finally:
        for one in outside:
            one.terminate()
            one.wait()


def test_an_external_process_that_goes_ends_the_run(recipes):
    file, config = recipes.folder / "b.address", recipes.folder / "b.toml"
    config.write_text(f'address_file = "{file}"\n[server]\naddress = "127.0.0.1:0"\n')
    outside = subprocess.Popen([*stage_command("buffer"), "--config", str(config)])
    try:
        wait_until(file.exists)
        started = recipes.start(buffer={"command": [], "address": file.read_text()}, trainer=ENDLESS)
        up(recipes, started)
        outside.kill()
        outside.wait()
        assert started.wait(60) == 1, recipes.output
        assert "is gone" in recipes.output
    finally:
        outside.kill()
        outside.wait()


def test_resume_needs_a_run_of_the_same_name(recipes):
    missing = subprocess.run(
        [sys.executable, "-m", "vime_launch", "run", str(recipes.write()), "--resume", str(recipes.folder / "runs/none")],
        capture_output=True,
        text=True,
    )
    assert missing.returncode == 2 and "no run there" in missing.stderr
