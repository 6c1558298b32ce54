"""``vime demo``: builds the task, warms the model up, runs the recipe, and holds the figures against what they have to be."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

from rich.console import Console

from vime_launch import toml
from vime_launch.demo import _answer
from vime_launch.demo._acceptance import Figures, faults, figures_of
from vime_launch.demo._task import write_task
from vime_launch.launcher import launch, open_folder
from vime_launch.metrics import Metrics
from vime_launch.plan import RunFolder
from vime_launch.process_tree import tree
from vime_launch.recipe import Recipe, RecipeError, load_recipe
from vime_launch.recipes import find_recipe

_SFT_STEPS, _SHORT_SFT_STEPS, _SFT_BATCH = 640, 60, 256
_SHORT_STEPS = 3
_QUESTIONS = 200
_POLL_SECONDS = 0.5


def demo(arguments: argparse.Namespace, pythons: dict[str, str]) -> int:
    """Runs the demo for each seed; answers 0 when every one of them did what it has to.

    Raises:
        RecipeError: a demo that cannot start.
    """
    console = Console()
    results = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        results[seed] = _one(arguments, pythons, seed, console)
    if len(results) > 1:
        for seed, (code, figures) in results.items():
            shown = f"{figures.sft_accuracy} -> {figures.final_accuracy} in {figures.steps} steps" if figures else "failed"
            _say(console, f"seed {seed}: {shown} ({'ok' if code == 0 else 'NOT ok'})")
    return max(code for code, _ in results.values())


def _recipe(arguments: argparse.Namespace, pythons: dict[str, str], seed: int) -> Recipe:
    base = arguments.name or ("demo" if arguments.max_staleness == 0 else f"demo-staleness-{arguments.max_staleness}")
    sets = [
        f'name="{base if seed == arguments.seed else f"{base}-{seed}"}"',
        f'runs_dir="{arguments.runs_dir}"',
        f"trainer.config.seed={seed}",
        f"worker.config.seed={seed}",
        f"engine.config.seed={seed}",
        f"trainer.config.max_staleness={arguments.max_staleness}",
    ]
    steps = arguments.steps or (_SHORT_STEPS if arguments.short else None)
    if steps:
        sets.append(f"trainer.config.max_steps={steps}")
    return load_recipe(find_recipe("demo.toml"), [*sets, *arguments.set], pythons)


def _one(arguments: argparse.Namespace, pythons: dict[str, str], seed: int, console: Console) -> tuple[int, Figures | None]:
    started = time.monotonic()
    recipe = _recipe(arguments, pythons, seed)
    folder = open_folder(recipe, None)
    assert recipe.trainer is not None and recipe.trainer.python is not None
    sft_steps = arguments.sft_steps or (_SHORT_SFT_STEPS if arguments.short else _SFT_STEPS)
    peak = _warm_up(recipe.trainer.python, recipe.trainer.env, folder, sft_steps, seed, console)
    if arguments.prepare_only:
        _say(console, f"task and warmed-up model are in {folder.path}; go on with: vime run RECIPE")
        return 0, None
    code = launch(recipe, None, console)
    if code:
        return code, None
    figures = figures_of(Metrics(folder / "metrics.jsonl"))
    answered = _answer_questions(recipe.trainer.python, recipe.trainer.env, folder)
    found = faults(figures, arguments.max_staleness, not arguments.short, arguments.max_difference)
    if not arguments.short and answered["right"] <= answered["asked"] * 0.8:
        found.append(f"transformers answers {answered['right']} of {answered['asked']} held-out sums with the final checkpoint")
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary |= figures.asdict() | {
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "peak_rss_gib": max(summary["peak_rss_gib"], round(peak / 2**30, 3)),
        "transformers": answered,
        "accepted": not found,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")
    _report(console, figures, summary, folder)
    for fault in found:
        _say(console, f"NOT as it has to be: {fault}")
    return (1 if found else 0), figures


def _warm_up(python: str, env: dict[str, str], folder: RunFolder, steps: int, seed: int, console: Console) -> int:
    """Builds the task and trains on the sloppy teacher; answers the most memory of it, in bytes."""
    _say(console, f"writing the task to {folder / 'task'}")
    write_task(folder / "task", steps * _SFT_BATCH, seed)
    settings = {
        "model": str(folder / "init"),
        "output": str(folder / "sft"),
        "seed": seed,
        "steps": steps,
        "batch_size": _SFT_BATCH,
        "log_interval": 80,
        "data": {"files": [str(folder / "task/sft.jsonl")], "special_tokens": False},
        "optimizer": {
            "kind": "adamw",
            "learning_rate": 3e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.01,
            "clip_grad_norm": 1.0,
            "schedule": "linear",
            "warmup_updates": min(50, steps // 4),
            "minimum_ratio": 0.05,
        },
    }
    (folder / "stages/sft.toml").write_text(toml.dumps(settings))
    init = ["init", "--model-config-file", str(folder / "task/model"), "--tokenizer", str(folder / "task/model")]
    init += ["--output", str(folder / "init"), "--seed", str(seed)]
    peak = _stage(python, env, init, folder.log("init"), console)
    _say(console, f"warming up: {steps} steps on a teacher that forgets carries in 57 % of its answers")
    return max(peak, _stage(python, env, ["sft", "--config", str(folder / "stages/sft.toml")], folder.log("sft"), console))


def _stage(python: str, env: dict[str, str], arguments: list[str], log: Path, console: Console) -> int:
    """Runs ``vime-trainer`` to its end and answers its largest memory, in bytes.

    Raises:
        RecipeError: it failed; the text holds its last lines.
    """
    started, peak = time.monotonic(), 0
    with log.open("w") as output:
        command = [python, "-m", "vime_trainer", *arguments]
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env})
        except OSError as error:
            raise RecipeError(f"trainer: cannot start {python}: {error.strerror}") from None
        try:
            while process.poll() is None:
                peak = max(peak, sum(seen.resident for seen in tree(os.getpid())))
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise RecipeError(f"vime-trainer {arguments[0]} ended with {process.returncode}:\n" + log.read_text()[-3000:])
    _say(console, f"vime-trainer {arguments[0]}: {time.monotonic() - started:.0f} s")
    return peak


def _answer_questions(python: str, env: dict[str, str], folder: RunFolder) -> dict:
    """Has transformers load the final checkpoint and answer held-out sums."""
    command = [python, _answer.__file__, str(folder / "trainer/final"), str(folder / "task/held_out.jsonl"), str(_QUESTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    if done.returncode:
        raise RecipeError(f"transformers cannot use the final checkpoint:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _report(console: Console, figures: Figures, summary: dict, folder: RunFolder) -> None:
    def number(value: float | None, form: str) -> str:
        return "not measured" if value is None else form.format(value)

    rows = [
        ("held-out accuracy after SFT", number(figures.sft_accuracy, "{:.3f}")),
        (f"held-out accuracy after {figures.steps} steps of GRPO", number(figures.final_accuracy, "{:.3f}")),
        ("mean |log-prob trainer - engine|, worst step", number(figures.logprob_abs_diff_max, "{:.2e}")),
        ("  of one micro-batch every few steps", number(figures.logprob_abs_diff_with_replay, "{:.2e}")),
        ("  the same with replay off", number(figures.logprob_abs_diff_without_replay, "{:.2e}")),
        ("  the same with routes shifted by one row", number(figures.logprob_abs_diff_shifted_routes, "{:.2e}")),
        ("rows replayed", number(figures.rows_replayed, "{}")),
        ("  rows that the trainer alone would have routed otherwise", number(figures.rows_flipped, "{}")),
        ("largest staleness, batches", number(figures.staleness_max, "{:.0f}")),
        ("transformers with the final checkpoint", "{right} of {asked} right".format(**summary["transformers"])),
        ("  its answers", "  ".join(summary["transformers"]["examples"])),
        ("seconds", f"{summary['seconds']:.0f}"),
        ("peak memory of all processes, GiB", f"{summary['peak_rss_gib']:.2f}"),
        ("everything is in", str(folder.path)),
    ]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        console.print(f"{label:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
