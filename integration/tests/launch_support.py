"""Recipes of test stages, and launchers that run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from vime_launch import toml
from vime_launch.recipe import STAGES

STAGE = str(Path(__file__).with_name("stage.py"))
_CLUSTER = """
import sys
from vime_launch.hosts import Hosts
from vime_launch.recipe import RayTable
hosts = Hosts(RayTable(gpus=16))
import ray
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
hosts.shutdown()
"""


def start_cluster() -> tuple[subprocess.Popen, str]:
    """A Ray cluster that says to have 16 GPUs, and its address. It ends when its standard input does."""
    # A cluster that Ray starts asks for a token, and does not tell it to those who join.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    process = subprocess.Popen([sys.executable, "-c", _CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip()
    assert address, f"no Ray cluster: status {process.wait()}"
    return process, address


def stage_command(kind: str) -> list[str]:
    return [sys.executable, STAGE, kind]


class Recipes:
    """Recipes of test stages, and launchers that run them as a user would: as a process of their own.

    Args:
        cluster: answers the address of a running Ray cluster, which runs are on that do not ask for their own.
    """

    def __init__(self, folder: Path, cluster: Callable[[], str]):
        self.folder, self._cluster = folder, cluster
        self.started: list[subprocess.Popen] = []

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "r1"

    def values(self, **stages: dict) -> dict:
        values: dict = {"name": "r1", "runs_dir": str(self.folder / "runs")}
        for kind in STAGES:
            values[kind] = {"command": stage_command(kind)}
        for kind, table in stages.items():
            if table is None:
                values.pop(kind, None)
            elif isinstance(table, dict) and kind in values:
                values[kind] = {**values[kind], **table}
            else:
                values[kind] = table
        return values

    def write(self, **stages: dict) -> Path:
        path = self.folder / "recipe.toml"
        path.write_text(toml.dumps(self.values(**stages)))
        return path

    def start(self, *arguments: str, own_ray: bool = False, **stages: dict) -> subprocess.Popen:
        """Starts ``vime run`` on a recipe of test stages; output goes to ``out.log``."""
        if not own_ray:
            stages["ray"] = {"address": self._cluster()}
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with (self.folder / "out.log").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "vime_launch", "run", str(self.write(**stages)), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    @property
    def output(self) -> str:
        return (self.folder / "out.log").read_text()

    def processes(self) -> list[int]:
        """Process ids of stages, and of children that they left, of this test."""
        mark = str(self.folder).encode()
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    if mark in (path / "cmdline").read_bytes():
                        found.append(int(path.name))
                except OSError:
                    continue
        return [pid for pid in found if pid not in {one.pid for one in self.started}]
