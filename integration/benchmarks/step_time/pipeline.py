"""The recipe of one run of the whole pipeline, and the run itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import SKIPPED
from shapes import Job
from watching import Asked, Limits

HERE = Path(__file__).parent
_SHM = Path("/dev/shm")


def recipe(job: Job, name: str, folder: Path, staleness: int, gpus: int, tiny: bool) -> dict[str, Any]:
    """The recipe, as a nested table.

    Args:
        job: what a step is.
        name: of the run.
        folder: holds model/ and prompts.jsonl; the run's folder is made in it.
        staleness: batches that a sample may lag behind.
        gpus: 1 has engine and trainer share what is visible, 2 gives them one each.
        tiny: a CPU.
    """
    model = str(folder / "model")
    path = os.pathsep.join(filter(None, (str(HERE / "rewards"), os.environ.get("PYTHONPATH"))))
    threads = {"OMP_NUM_THREADS": "1"} if tiny else {}
    stage_gpus = {"gpus": 1} if gpus == 2 else {}
    engine: dict[str, Any] = {"model": model, "dtype": "bfloat16", "max_model_len": job.model_len, "max_num_seqs": job.rollouts}
    if tiny:
        engine["kv_cache_gib"] = 0.25
    else:
        engine["vllm"] = {"gpu_memory_utilization": 0.3 if gpus == 1 else 0.85}
    sampling = {"temperature": 1.0, "max_new_tokens": job.new_tokens, "ignore_eos": True}
    return {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "ray": {"cpus": 2} | ({"gpus": 2} if gpus == 2 else {}),
        "buffer": {"config": {"prompts": [{"path": str(folder / "prompts.jsonl"), "text_field": "prompt"}]}},
        "router": {},
        "engine": {"env": threads, "config": engine} | stage_gpus,
        "worker": {
            "env": {"PYTHONPATH": path} | threads,
            "config": {
                "tokenizer": model, "reward": "step", "rewards": {"step": {"function": "step_time_reward:score"}},
                # As many as may be on loan at once; the engine takes what fits.
                "max_groups_in_flight": job.groups * (1 + staleness), "sampling": sampling,
            },
        },
        "trainer": {
            "env": threads | ({} if tiny else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
            "config": {
                "model": model, "dtype": "bfloat16", "max_staleness": staleness, "r3": "off", "export_model": False,
                "batch": {"groups": job.groups, "group_size": job.group_size, "token_budget": job.token_budget},
                "optimizer": {"kind": "adamw", "learning_rate": 1e-6},
                "weights": _weights(job),
            },
        } | stage_gpus,
    }  # fmt: skip


def _weights(job: Job) -> dict[str, Any]:
    """Two versions lie in /dev/shm at once; containers may have given it too little."""
    sizes = job.sizes
    layer = sizes["hidden_size"] * (3 * sizes["intermediate_size"] + 4 * sizes["num_attention_heads"] * sizes["head_dim"])
    bound = 2 * (sizes["vocab_size"] * sizes["hidden_size"] + sizes["num_hidden_layers"] * layer)
    if _SHM.is_dir() and shutil.disk_usage(_SHM).free > 3 * bound:
        return {"transport": "shm"}
    return {"transport": "file", "root": "${run}/weights"}


@contextlib.contextmanager
def running(values: dict[str, Any], folder: Path, steps: int, limits: Limits, asked: Asked) -> Iterator[tuple[Path, str]]:
    """Runs a recipe until it has reported so many steps: the run's folder, and why it waits no longer when steps lack.

    It is interrupted after the block, so that what was measured can be told before.

    Raises:
        RuntimeError: it ended by itself, or too few steps are there to count any; holds the last lines of the stages' logs.
    """
    from vime_launch import toml

    runs = Path(values["runs_dir"]) / values["name"]
    shutil.rmtree(runs, ignore_errors=True)
    path = folder / f"{values['name']}.toml"
    path.write_text(toml.dumps(values))
    command = [sys.executable, "-m", "vime_launch", "run", str(path)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / f"{values['name']}.log").open("w"))
        # Ctrl-C of a terminal reaches this script alone, which then interrupts the launcher.
        launcher = asked.running(command, signal.SIGINT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        process = stack.enter_context(launcher)
        ended = asked.watch(process, lambda: len(rows(runs)), steps, limits)
        found = len(rows(runs))
        if ended == "exit" or found <= SKIPPED:
            fault = f"the launcher ended with {process.returncode}" if ended == "exit" else ended
            raise RuntimeError(f"{values['name']}: {found} of {steps} steps: {fault}\n{_tails(runs, log.name)}")
        yield runs, ended


def rows(runs: Path) -> list[dict[str, Any]]:
    """What was reported of each step: ``step``, ``time`` and ``values``."""
    path = runs / "metrics.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [row for line in whole.splitlines() if "seconds/step" in (row := json.loads(line))["values"]]


def _tails(runs: Path, log: str, lines: int = 15) -> str:
    files = [Path(log), *sorted((runs / "logs").glob("*.log"))]
    return "\n".join(f"== {one.name}\n" + "\n".join(one.read_text(errors="replace").splitlines()[-lines:]) for one in files)
