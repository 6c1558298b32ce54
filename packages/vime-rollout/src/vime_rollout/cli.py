"""The command ``vime-rollout``: picks the half that runs, and imports only that one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from vime_proto.errors import nearest
from vime_rollout import __version__

_COMMANDS = {
    "engine": ("vime_rollout.engine", "serve a model: generation, scoring, weight updates"),
    "worker": ("vime_rollout.worker", "lease prompts, generate, score, commit groups"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``vime-rollout engine|worker ...``; answers the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: vime-rollout COMMAND [--config FILE.toml] [--key value ...]\n\ncommands:")
        for name, (_, what) in _COMMANDS.items():
            print(f"  {name}  {what}")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in _COMMANDS:
        print(f"vime-rollout: {nearest(arguments[0], _COMMANDS, 'command')}", file=sys.stderr)
        return 2
    module = importlib.import_module(_COMMANDS[arguments[0]][0])
    return module.main(arguments[1:])
