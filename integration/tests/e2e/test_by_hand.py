"""The commands by hand, one a terminal, do what ``vime run`` does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

from e2e_support import wait_until

from vime_launch.recipe import COMMANDS, STAGES
from vime_launch.recipes import find_recipe


def test_five_commands_by_hand(home, prepared):
    folder = home / "runs/by-hand"
    shutil.copytree(prepared / "task", folder / "task")
    shutil.copytree(prepared / "sft/final", folder / "sft/final")
    started: dict[str, subprocess.Popen] = {}

    def log(stage: str):
        return folder / f"{stage}.log"

    try:
        for stage in STAGES:
            command = [os.environ[f"VIME_PYTHON_{stage.upper()}"], *COMMANDS[stage]]
            command += ["--config", str(find_recipe(f"by_hand/{stage}.toml")), "--exit-with-parent"]
            command += ["--max-steps", "2", "--evaluations", "[]"] if stage == "trainer" else []
            with log(stage).open("w") as output:
                started[stage] = subprocess.Popen(command, cwd=home, stdout=output, stderr=subprocess.STDOUT)
        trainer = started["trainer"]
        final = folder / "trainer/final/model.safetensors"
        wait_until(final.exists, 300, trainer, lambda: log("trainer").read_text()[-3000:])
        assert trainer.wait(60) == 0, log("trainer").read_text()[-3000:]
        # The run is closed: the worker is done, too. The servers stay until somebody ends them.
        assert started["worker"].wait(60) == 0, log("worker").read_text()[-3000:]
        servers = [started[stage] for stage in ("buffer", "router", "engine")]
        assert all(one.poll() is None for one in servers)
        for one in servers:
            one.send_signal(signal.SIGINT)
        assert [one.wait(30) for one in servers] == [0, 0, 0]
    finally:
        for one in started.values():
            if one.poll() is None:
                one.kill()
                one.wait()
