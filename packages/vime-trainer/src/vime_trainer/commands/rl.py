"""`vime-trainer rl`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str], prog: str) -> int:
    """Runs the loop of vime_trainer.rl."""
    from vime_trainer import rl

    return rl.main(argv, prog)
