"""Recipes of test stages, and launchers that run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vime_launch import toml
from vime_launch.recipe import STAGES

STAGE = str(Path(__file__).with_name("stage.py"))


def stage_command(kind: str) -> list[str]:
    return [sys.executable, STAGE, kind]


class Recipes:
    """Recipes of test stages, and launchers that run them as a user would: as a process of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
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

    def start(self, *arguments: str, **stages: dict) -> subprocess.Popen:
        """Starts ``vime run`` on a recipe of test stages; output goes to ``out.log``."""
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
