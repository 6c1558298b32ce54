"""Seconds of a whole GRPO step through buffer, router, engine, worker and trainer, and beside it those of a peer.

    python step_time/run.py --work DIR [--staleness 0,1] [--steps 6] [--gpus 1|2] [--peer] [--tiny] [--limit 240] ...

Random bfloat16 weights of the sizes of Qwen3-0.6B, 32 prompts of 100 tokens x 8 answers of exactly 512, a reward that costs
nothing: what remains is the framework. On one GPU engine and trainer share it, and neither sleeps; with --gpus 2 each has its
own. --peer runs TRL's GRPOTrainer with vLLM colocated on the same model and prompts, after the others; --staleness "" leaves
ours out. --tiny is a small job for a CPU. Stages run by VIME_PYTHON_<STAGE>, else by this interpreter; vime-rollout must be
installed there, since vLLM finds its plug-in by entry point. One JSON line a result, medians over all steps but the first two;
a result whose steps are not all there, since its --limit was over or this script was asked to end, says so under "ended".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from figures import SKIPPED, GpuMemory, summary
from pipeline import recipe, rows, running
from shapes import FULL, TINY, Job, write_inputs
from watching import Asked, Limits


def prepare(job: Job, folder: Path) -> None:
    """Writes prompts and model, unless they are there for this very job."""
    about = json.dumps(dataclasses.asdict(job))
    done = folder / "job.json"
    if done.exists():
        if done.read_text() != about:
            raise SystemExit(f"--work {folder}: holds another job; choose another folder")
        return
    write_inputs(job, folder)
    # Of a preparation that was cut short.
    shutil.rmtree(folder / "model", ignore_errors=True)
    python = os.environ.get("VIME_PYTHON_TRAINER") or sys.executable
    command = [python, "-m", "vime_trainer", "init", "--model-config-file", str(folder / "config")]
    command += ["--tokenizer", str(folder / "config"), "--output", str(folder / "model"), "--dtype", "bfloat16"]
    begun = time.monotonic()
    subprocess.run(command, check=True, stdout=sys.stderr)
    print(f"model written in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    done.write_text(about)


@contextlib.contextmanager
def ours(job: Job, folder: Path, staleness: int, arguments: argparse.Namespace, asked: Asked) -> Iterator[dict]:
    """Figures of the pipeline, which is interrupted after the block."""
    values = recipe(job, f"staleness-{staleness}", folder, staleness, arguments.gpus, arguments.tiny)
    limits = Limits(arguments.start_limit, arguments.limit)
    with GpuMemory().watched() as memory, running(values, folder, arguments.steps, limits, asked) as (runs, ended):
        transport = values["trainer"]["config"]["weights"]["transport"]
        figures = {"what": "vime", "staleness": staleness, "gpus": arguments.gpus, "transport": transport}
        figures |= summary(rows(runs), job, staleness)
        yield figures | {"gpu_peak_gib": memory.peak_gib or None} | ({"ended": ended} if ended else {})


@contextlib.contextmanager
def peer(folder: Path, arguments: argparse.Namespace, asked: Asked) -> Iterator[dict]:
    """Figures of the peer, which is ended after the block."""
    script = Path(__file__).with_name("peer.py")
    # One GPU, which is what it is for: of several visible ones its trainer would make use in a way of its own.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": first, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, str(script), str(folder), str(arguments.steps)]
    said, logged = folder / "peer.out", folder / "peer.log"
    limits = Limits(arguments.start_limit, arguments.limit)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(GpuMemory().watched())
        out, log = stack.enter_context(said.open("w")), stack.enter_context(logged.open("w"))
        options = {"env": env, "stdout": out, "stderr": log, "start_new_session": True}
        process = stack.enter_context(asked.running(command, signal.SIGTERM, **options))
        # It ends by itself after its last step.
        ended = asked.watch(process, lambda: logged.read_text(errors="replace").count("\nstep "), sys.maxsize, limits)
        # Its trainer prints dictionaries of its own there.
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.startswith('{"')]
        if process.returncode or not lines:
            fault = f"ended with {process.returncode}" if ended == "exit" else ended
            tail = "\n".join(logged.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"peer: {fault}\n{tail}")
        figures = {"what": "trl"} | json.loads(lines[-1]) | {"gpu_peak_gib": memory.peak_gib or None}
        yield figures | ({} if ended == "exit" else {"ended": ended})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for model, runs and logs")
    parser.add_argument("--staleness", default="0,1", help="values of max_staleness, each a run")
    parser.add_argument("--steps", type=int, default=6, help=f"of each run, the first {SKIPPED} of which do not count")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="2: engine and trainer have one each")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of each run after its first step")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds of each run until its first step is done")
    parser.add_argument("--peer", action="store_true", help="also run TRL")
    parser.add_argument("--tiny", action="store_true", help="a small job on a CPU")
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED:
        parser.error(f"--steps: must be above {SKIPPED}")
    job, folder = (TINY if arguments.tiny else FULL), arguments.work.resolve()
    # Whoever ends this script ends what it started, and still gets the steps that are there.
    asked = Asked()
    asked.listen()
    prepare(job, folder)
    todo = [functools.partial(ours, job, folder, int(one), arguments, asked) for one in arguments.staleness.split(",") if one]
    todo += [functools.partial(peer, folder, arguments, asked)] if arguments.peer else []
    failed = 0
    for measure in todo:
        begun = time.monotonic()
        try:
            with measure() as result:
                print(json.dumps(result | {"wall": round(time.monotonic() - begun, 1), "host": platform.node()}), flush=True)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            failed += 1
        asked.obey()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
