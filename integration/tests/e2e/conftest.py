from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_support import wait_until

from vime_launch import toml
from vime_launch.recipe import STAGES

MISSING = [stage for stage in STAGES if not os.environ.get(f"VIME_PYTHON_{stage.upper()}")]


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=f"no interpreter of {', '.join(MISSING)}: VIME_PYTHON_<STAGE>"))


class Vime:
    """The command ``vime``, as a user runs it, with the output of its last run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = folder / "vime.log"

    def start(self, *words: str) -> subprocess.Popen:
        with self.log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "vime_launch", *words],
                cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def run(self, *words: str, seconds: float = 600) -> int:
        process = self.start(*words)
        try:
            return process.wait(seconds)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text()


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def vime(home) -> Vime:
    return Vime(home)


@pytest.fixture(scope="session")
def prepared(vime) -> Path:
    """The task, and a model that a short warm-up made."""
    assert vime.run("demo", "--prepare-only", "--short", "--name", "prepared") == 0, vime.output
    return vime.folder / "runs" / "prepared"


@pytest.fixture(scope="session")
def engine(prepared, home):
    """One real engine, started by hand, that several runs named "e2e" use at its address."""
    path, log = home / "engine.address", home / "engine.log"
    config = {
        "model": str(prepared / "sft/final"), "run_id": "e2e", "route_capture": True, "max_model_len": 32, "kv_cache_gib": 0.25,
        "address_file": str(path), "exit_with_parent": True, "file_root": str(home),
    }  # fmt: skip
    (home / "engine.toml").write_text(toml.dumps(config))
    python = os.environ["VIME_PYTHON_ENGINE"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-m", "vime_rollout", "engine", "--config", str(home / "engine.toml")], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(path.exists, 300, process, lambda: log.read_text()[-3000:])
        yield path.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
