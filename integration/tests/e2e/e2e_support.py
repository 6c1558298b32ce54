"""What the end-to-end tests share."""

from __future__ import annotations

import subprocess
import time
import tomllib
from pathlib import Path

from vime_launch.recipes import find_recipe


def wait_until(condition, seconds: float, process: subprocess.Popen, say=lambda: "", pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}: {say()}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {say()}"
        time.sleep(pause)


def demo_recipe(prepared: Path) -> dict:
    """The demo's recipe over the prepared model."""
    return tomllib.loads(find_recipe("demo.toml").read_text().replace("${run}", str(prepared)))


def stage_process(folder: Path, name: str) -> int:
    """The process of a stage: the one that has its configuration and is no guard."""
    config = str(folder / "stages" / f"{name}.toml")
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                words = (path / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if config in words and not any(word.endswith("guard.py") for word in words):
                return int(path.name)
    raise AssertionError(f"{name} does not run")
