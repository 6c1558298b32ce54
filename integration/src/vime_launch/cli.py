"""Command ``vime``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from vime_launch import __version__
from vime_launch.recipe import STAGES, RecipeError, load_recipe

BAD_INPUT = 2


def _at_least(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {value}")
        return value

    read.__name__ = "whole number"  # named by argparse where the text is none
    return read


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


_positive.__name__ = "number"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"vime-launch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a recipe", allow_abbrev=False)
    run.add_argument("recipe", help="TOML file")
    run.add_argument("--set", action="append", default=[], metavar="A.B=C", help="lay a value on top of the recipe")
    run.add_argument("--dry-run", action="store_true", help="print what every stage would run with, and start nothing")
    run.add_argument("--resume", metavar="FOLDER", help="continue the run in this folder")
    _pythons(run)
    demo = commands.add_parser("demo", help="train a tiny model by reinforcement learning", allow_abbrev=False)
    demo.add_argument("--seeds", type=_at_least(1), default=1, metavar="N", help="repeat with seeds 0 to N-1")
    demo.add_argument("--seed", type=_at_least(0), default=0, metavar="S", help="the first seed")
    demo.add_argument("--steps", type=_at_least(1), default=None, help="steps of reinforcement learning")
    demo.add_argument("--max-staleness", type=_at_least(0), default=0, help="batches that a sample may lag behind")
    demo.add_argument(
        "--max-difference", type=_positive, default=1e-5, metavar="NATS",
        help="bound of the mean log-prob difference (float32 on CPU: 1e-5; GPUs multiply in TF32: 2e-3)",
    )  # fmt: skip
    demo.add_argument("--short", action="store_true", help="a few steps after a short warm-up; no claim on accuracy")
    demo.add_argument("--sft-steps", type=_at_least(1), default=None, help="steps of the warm-up")
    demo.add_argument("--prepare-only", action="store_true", help="build the task and warm the model up, and stop there")
    demo.add_argument("--runs-dir", default="runs", help="where the run folder is made")
    demo.add_argument("--name", default=None, help="name of the run folder; a number is added for further seeds")
    demo.add_argument("--set", action="append", default=[], metavar="A.B=C", help="lay a value on top of the recipe")
    _pythons(demo)
    return parser


def _pythons(parser: argparse.ArgumentParser) -> None:
    for stage in STAGES:
        parser.add_argument(
            f"--python.{stage}", dest=f"python_{stage}", metavar="PATH",
            help=f"interpreter of the {stage} (else the recipe's, VIME_PYTHON_{stage.upper()}, or this one)",
        )  # fmt: skip


def pythons(arguments: argparse.Namespace) -> dict[str, str]:
    """The interpreters that the command line names, by stage."""
    named = {stage: getattr(arguments, f"python_{stage}") for stage in STAGES}
    return {stage: path for stage, path in named.items() if path}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and answers its exit status: 2 for input that is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "demo":
            from vime_launch.demo import demo

            return demo(arguments, pythons(arguments))
        recipe = load_recipe(arguments.recipe, arguments.set, pythons(arguments))
        if arguments.dry_run:
            from vime_launch.dry_run import dry_run

            print(dry_run(recipe, dict(os.environ)))
            return 0
        from vime_launch.launcher import launch

        return launch(recipe, arguments.resume)
    except RecipeError as error:
        for line in str(error).splitlines():
            print(f"vime: {line}", file=sys.stderr)
        return BAD_INPUT
