"""``vime run``: from a recipe to a finished run folder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from vime_launch import toml
from vime_launch.batches import export_batches
from vime_launch.dry_run import dry_run
from vime_launch.hosts import Hosts
from vime_launch.live import View
from vime_launch.metrics import LOGPROB_DIFF, REWARD, STALENESS_MAX, Metrics, follow
from vime_launch.picture import draw
from vime_launch.plan import RunFolder, processes
from vime_launch.process_tree import Watched
from vime_launch.recipe import Recipe, RecipeError
from vime_launch.supervisor import Outcome, Supervisor
from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import open_channel
from vime_proto.process import stop_event

_STATS_SECONDS = 2.0
_SAMPLE_SECONDS = 0.5
_LAST_FIGURES_SECONDS = 5.0
# Beyond a stage's own grace, what is left of a run is killed after so long.
_REAP_SECONDS = 2.0
_PEAK_FILE = "peak_rss_bytes"
INTERRUPTED = 130
BAD_INPUT = 2


def open_folder(recipe: Recipe, resume: str | None) -> RunFolder:
    """The run's folder, made for a new run.

    Raises:
        RecipeError: it exists and is not resumed, or is to be resumed and does not exist or belongs to another run.
    """
    folder = RunFolder(Path(recipe.runs_dir) / recipe.name if resume is None else Path(resume))
    exists = (folder / "recipe.toml").exists()
    if resume is None and exists:
        raise RecipeError(f"{folder.path} holds a run: continue it with --resume {folder.path}, or give another name")
    if resume is not None and not exists:
        raise RecipeError(f"--resume {resume}: no run there (it has no recipe.toml)")
    if resume is not None and folder.path.name != recipe.name:
        raise RecipeError(f"--resume {resume}: the folder is of run {folder.path.name!r}, the recipe is of {recipe.name!r}")
    folder.make()
    return folder


def launch(recipe: Recipe, resume: str | None = None, console: Console | None = None) -> int:
    """Runs a recipe to its end and answers the exit status: 0 when the trainer (or the export) finished.

    Call it on the main thread: the Ray cluster that it starts ends with the thread that started it.

    Raises:
        RecipeError: a run that cannot start.
    """
    console = console or Console()
    folder = open_folder(recipe, resume)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"{folder.path} is in use by another launcher") from None
        # As resolved: the defaults too, and every override. From here on the folder holds a run.
        (folder / "recipe.toml").write_text(toml.dumps(recipe.model_dump(mode="json", exclude_none=True)))
        metrics = Metrics(folder / "metrics.jsonl")
        watched = Watched(recipe.stop_seconds + _REAP_SECONDS, _earlier_peak(folder))
        started = time.monotonic()
        hosts: Hosts | None = None
        outcome = Outcome(INTERRUPTED, "interrupted")
        with View(console, f"{recipe.name} ({recipe.mode})") as view:
            try:
                hosts = Hosts(recipe.ray)
                outcome = asyncio.run(_run(recipe, folder, hosts, view, metrics, watched))
            except KeyboardInterrupt:
                view.say("interrupted")
            finally:
                if hosts is not None:
                    hosts.shutdown()
                watched.close()
            view.say(outcome.reason)
        if outcome.code == BAD_INPUT and resume is None:
            # Nothing was trained: the same name may be tried again.
            (folder / "recipe.toml").unlink()
        _close(recipe, folder, metrics, outcome, time.monotonic() - started, watched.peak_gib)
    return outcome.code


async def _run(
    recipe: Recipe, folder: RunFolder, hosts: Hosts, view: View, metrics: Metrics, watched: Watched
) -> Outcome:
    stop = stop_event()
    plan = processes(recipe, folder)
    supervisor = Supervisor(recipe, folder, plan, hosts, view.say)

    async def interrupted() -> None:
        await stop.wait()
        supervisor.end(INTERRUPTED, "interrupted: everything that was started here is ended")

    async def check() -> None:
        # A wrong key of the last stage does not wait until all others have started.
        try:
            await asyncio.to_thread(dry_run, recipe, dict(os.environ), known_only=True)
        except RecipeError as error:
            supervisor.end(BAD_INPUT, str(error))

    followed: set[asyncio.Task[None]] = set()

    async def work() -> None:
        await supervisor.up()
        at = {process.kind: process.address for process in plan}
        if "trainer" in at:
            followed.add(supervisor.spawn(follow(at["trainer"], metrics, view.step), "metrics"))
        if "buffer" in at:
            supervisor.spawn(_stats(at["buffer"], recipe.name, view), "buffer statistics")
        if recipe.export_batches:
            target = folder.path / recipe.export_batches.path
            count = await export_batches(recipe, at["buffer"], target)
            supervisor.end(0, f"{count} batches written to {target}")

    supervisor.spawn(interrupted(), "signals")
    supervisor.spawn(_sample(watched, folder), "memory")
    supervisor.spawn(check(), "configuration")
    supervisor.spawn(work(), "start")
    outcome = await supervisor.ended
    if outcome.code == 0 and followed:
        # The trainer has ended; its last figures may still be on their way.
        await asyncio.wait(followed, timeout=_LAST_FIGURES_SECONDS)
    watched.sample()
    await supervisor.down()
    return outcome


async def _sample(watched: Watched, folder: RunFolder) -> None:
    written = watched.peak_gib
    while True:
        watched.sample()
        if watched.peak_gib > written:
            # At once: a launcher that is killed writes no summary, and its successor counts what it saw.
            written = watched.peak_gib
            (folder / _PEAK_FILE).write_text(f"{watched.peak_bytes}\n")
        await asyncio.sleep(_SAMPLE_SECONDS)


def _earlier_peak(folder: RunFolder) -> int:
    """The most memory, in bytes, that earlier launchers of this run saw; 0 for a new run."""
    try:
        return int((folder / _PEAK_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return 0


async def _stats(address: str, run_id: str, view: View) -> None:
    """Shows the buffer's counters. A buffer that does not answer ends the run through its own watch, not through this."""
    async with open_channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        while True:
            await asyncio.sleep(_STATS_SECONDS)
            try:
                stats = await stub.GetStats(buffer_pb2.GetStatsRequest(run_id=run_id), timeout=5)
            except grpc.RpcError:
                continue
            view.stats(
                f"buffer: {stats.prompts_leased} prompts on loan, {stats.groups_ready} groups ready, "
                f"{stats.groups_batch_leased} in training, {stats.groups_expired_total} expired, "
                f"{stats.prompts_dropped_total} dropped, version {stats.version if stats.HasField('version') else '-'}"
            )


def summarise(metrics: Metrics) -> dict[str, Any]:
    """The figures of a run; what was not measured is absent."""
    summary: dict[str, Any] = {}
    steps, rewards = metrics.series(REWARD)
    if steps:
        summary |= {"steps": steps[-1], "reward_first": rewards[0], "reward_last": rewards[-1]}
    _, evaluated, accuracy = metrics.accuracy()
    if evaluated:
        summary |= {"first_accuracy": accuracy[0], "final_accuracy": accuracy[-1], "best_accuracy": max(accuracy)}
    for name, key in ((LOGPROB_DIFF, "logprob_abs_diff_max"), (STALENESS_MAX, "staleness_max")):
        values = metrics.series(name)[1]
        if values:
            summary[key] = max(values)
    return summary


def _close(recipe: Recipe, folder: RunFolder, metrics: Metrics, outcome: Outcome, seconds: float, peak_gib: float) -> None:
    draw(metrics, folder / "picture.png", recipe.name)
    summary = {
        "name": recipe.name,
        "mode": recipe.mode,
        "status": outcome.code,
        "reason": outcome.reason,
        **summarise(metrics),
        "seconds": round(seconds, 1),
        "peak_rss_gib": peak_gib,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


