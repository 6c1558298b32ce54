"""What every stage would run with, as the stage itself resolves it."""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vime_launch.placement import merge_environment
from vime_launch.plan import Process, RunFolder, connect, processes, write_config
from vime_launch.recipe import Recipe, RecipeError

_SECONDS = 300


def dry_run(recipe: Recipe, environment: dict[str, str], known_only: bool = False) -> str:
    """The resolved configuration of every process, by asking each with ``--print-config``; nothing is started or written.

    Args:
        recipe: the run.
        environment: of the processes asked.
        known_only: leave out stages with a command of their own, which may not know ``--print-config``.

    Raises:
        RecipeError: the complaints of every stage that refuses its configuration.
    """
    target = RunFolder(Path(recipe.runs_dir) / recipe.name)
    plan = processes(recipe, target)
    started = [process for process in plan if not process.external and not (known_only and process.stage.command)]
    with tempfile.TemporaryDirectory(prefix="vime-dry-run-") as scratch:
        folder = RunFolder(Path(scratch))
        folder.make()

        def ask(process: Process) -> subprocess.CompletedProcess[str]:
            command = [*write_config(process, connect(process, plan), folder), "--print-config"]
            own = merge_environment(environment, process.stage.env, ())
            try:
                return subprocess.run(command, env=own, capture_output=True, text=True, timeout=_SECONDS)
            except OSError as error:
                return subprocess.CompletedProcess(command, 127, "", f"cannot start {command[0]}: {error.strerror}")
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(command, 124, "", f"no answer within {_SECONDS} s")

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(ask, started))
    faults = [
        f"{process.name}: {line}"
        for process, answer in zip(started, answers, strict=True)
        if answer.returncode
        for line in answer.stderr.strip().splitlines()[-20:] or [f"exit status {answer.returncode}"]
    ]
    if faults:
        raise RecipeError("\n".join(faults))
    texts = {process.name: answer.stdout.strip() for process, answer in zip(started, answers, strict=True)}
    texts |= {process.name: f"runs at {process.address}" for process in plan if process.external}
    return "\n\n".join(f"# {process.name}\n{texts[process.name]}" for process in plan if process.name in texts)
