"""The command `vime-trainer`. Each command's module is imported when it runs, so `--help` needs neither torch nor Megatron."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from vime_proto.errors import nearest
from vime_trainer.leaving import leave

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "init": ("vime_trainer.commands.init", "random weights for a config.json, as a Hugging Face folder"),
    "sft": ("vime_trainer.commands.sft", "supervised fine-tuning from JSONL files"),
    "rl": ("vime_trainer.commands.rl", "reinforcement learning from a buffer"),
    "plan": ("vime_trainer.commands.plan", "parameters, memory and arithmetic of a model on N GPUs; nothing is built"),
    "export": ("vime_trainer.commands.export", "a checkpoint as a Hugging Face folder"),
    "logprobs": ("vime_trainer.commands.logprobs", "log-probabilities of given tokens, as JSON lines"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    A fault of input, files or settings ends with one line on stderr and 1; a wrong option with 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name == "--version":
        from vime_trainer import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"vime-trainer: {nearest(name, COMMANDS, 'command')}", file=sys.stderr)
        return 2
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    module = importlib.import_module(COMMANDS[name][0])
    try:
        status = module.main(rest, f"vime-trainer {name}") or 0
    except (ValueError, OSError) as error:
        logging.getLogger(__name__).debug("refused", exc_info=True)
        print(f"vime-trainer {name}: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print(f"vime-trainer {name}: interrupted", file=sys.stderr)
        status = 130
    leave(status)
    return status


def _usage() -> str:
    lines = ["usage: vime-trainer COMMAND [--config FILE.toml] [--key value ...]", "", "commands:"]
    lines += [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "vime-trainer COMMAND --help lists a command's keys."])
