"""Several algorithms on the demo task, each from the same warmed-up model, through all five processes; draws a picture.

Usage: python compare_algorithms.py [--from RUN_FOLDER] [--steps 14] [--optimizer-steps 1] [--algorithms ppo,grpo,gspo]
       [--picture FILE]

RUN_FOLDER holds task/ and sft/final of a demo; without it, `vime demo --prepare-only` makes one first. Interpreters of the
stages are found as `vime run` finds them (VIME_PYTHON_TRAINER, ...). A run that is there already, with the same settings, is
not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from itertools import cycle
from pathlib import Path
from typing import Any

from vime_launch import toml
from vime_launch.metrics import REWARD, Metrics
from vime_launch.recipes import find_recipe

EXPLAINED = "critic/explained_variance"
ADAM = {"kind": "adam", "clip_grad_norm": 1.0}
# What differs from one to another; everything else is the demo's recipe.
TRAINERS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2},
        # 16 updates a batch: with the policy's one it would not even learn the mean reward within a dozen batches.
        "critic": {"optimizer_steps": 4, "epochs": 4, "optimizer": ADAM | {"learning_rate": 1e-3}},
    },
    "grpo": {"algorithm": {"name": "grpo", "aggregation": "token", "clip_low": 0.2, "clip_high": 0.28}},
    "gspo": {"algorithm": {"name": "gspo"}},
    "reinforce_plus_plus": {"algorithm": {"name": "reinforce_plus_plus"}},
    "rloo": {"algorithm": {"name": "rloo"}},
    "cispo": {"algorithm": {"name": "cispo"}},
    "dapo": {"algorithm": {"name": "dapo"}},
    "dppo": {"algorithm": {"name": "dppo"}},
}


def prepared(name: str, runs: Path) -> Path:
    """A run folder with the task and the warmed-up model."""
    folder = runs / f"{name}-warm"
    if not (folder / "sft/final").is_dir():
        command = [
            sys.executable,
            "-m",
            "vime_launch",
            "demo",
            "--prepare-only",
            "--name",
            folder.name,
            "--runs-dir",
            str(runs),
        ]
        subprocess.run(command, check=True)
    return folder


def every_third_question(warm: Path, path: Path) -> Path:
    """A sample of the held-out sums, in their order, so that evaluations are short."""
    rows = (warm / "task/held_out.jsonl").read_text().splitlines()
    path.write_text("".join(f"{row}\n" for row in rows[::3]))
    return path


def recipe(
    algorithm: str, name: str, runs: Path, warm: Path, steps: int, interval: int, optimizer_steps: int
) -> dict[str, Any]:
    """The demo's recipe for one algorithm, on another's warm start."""
    text = find_recipe("demo.toml").read_text().replace("${run}", str(warm.resolve()))
    values = tomllib.loads(text)
    values |= {"name": f"{name}-{algorithm}", "runs_dir": str(runs)}
    questions = every_third_question(warm, runs / f"{name}-held-out.jsonl")
    values["buffer"]["config"]["evaluation"]["held_out"]["path"] = str(questions)
    trainer = values["trainer"]["config"]
    trainer |= TRAINERS[algorithm] | {"max_steps": steps, "replay_check_interval": 0}
    trainer["batch"] |= {"optimizer_steps": optimizer_steps}
    trainer["evaluations"] = [{"set": "held_out", "interval": interval}]
    trainer["checkpoint"] = {"interval": steps}
    return values


def ran(values: dict[str, Any], runs: Path) -> Metrics:
    """Runs a recipe, or takes what it left before.

    Raises:
        SystemExit: its folder holds a run with other settings.
    """
    folder, file, text = runs / values["name"], runs / f"{values['name']}.toml", toml.dumps(values)
    if not (folder / "summary.json").exists():
        file.write_text(text)
        subprocess.run([sys.executable, "-m", "vime_launch", "run", str(file)], check=True)
    elif file.read_text() != text:
        raise SystemExit(f"{folder}: a run with other settings than asked for; choose another --name")
    return Metrics(folder / "metrics.jsonl")


def draw(curves: dict[str, Metrics], path: Path) -> None:
    """Held-out accuracy, training reward and what critics explain, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {
        "held-out accuracy, greedy": lambda metrics: metrics.accuracy()[1:],
        "reward of the batch, sampled": lambda metrics: metrics.series(REWARD),
        "explained variance of the critic": lambda metrics: metrics.series(EXPLAINED),
    }
    if not any(metrics.series(EXPLAINED)[0] for metrics in curves.values()):
        del panels["explained variance of the critic"]
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, series) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
        for number, ((name, metrics), style, width) in enumerate(
            zip(curves.items(), cycle(("-", "--", ":")), cycle((1.4, 2.2, 3.2)), strict=False)
        ):
            steps, values = series(metrics)
            if steps:
                # Curves may lie on one another.
                axes.plot(
                    steps, values, style, color=f"C{number}", marker="o" if place == 1 else None, markersize=3,
                    linewidth=width, label=name,
                )  # fmt: skip
        axes.legend(fontsize=9, loc="lower right" if place < 3 else "upper left")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="warm", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=14, help="batches")
    parser.add_argument(
        "--optimizer-steps", type=int, default=1, help="of the policy, a batch; with more than one, ratios leave 1"
    )
    parser.add_argument("--interval", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--algorithms", default="ppo,grpo,gspo")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--name", default="algorithms")
    parser.add_argument("--picture", type=Path, default=Path("docs/algorithms.png"))
    arguments = parser.parse_args()
    runs = arguments.runs_dir.resolve()
    warm = arguments.warm or prepared(arguments.name, runs)
    curves: dict[str, Metrics] = {}
    for algorithm in arguments.algorithms.split(","):
        values = recipe(
            algorithm, arguments.name, runs, warm, arguments.steps, arguments.interval, arguments.optimizer_steps
        )
        curves[algorithm] = ran(values, runs)
    for algorithm, metrics in curves.items():
        _, steps, accuracy = metrics.accuracy()
        print(f"{algorithm}: " + "  ".join(f"{step}: {value:.3f}" for step, value in zip(steps, accuracy, strict=True)))
        steps, explained = metrics.series(EXPLAINED)
        if steps:
            print("  explained: " + "  ".join(f"{step}: {v:.2f}" for step, v in zip(steps, explained, strict=True)))
    draw(curves, arguments.picture)
    print(f"picture: {arguments.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
