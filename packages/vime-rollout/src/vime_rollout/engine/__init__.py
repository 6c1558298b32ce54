"""``vime-rollout engine``: vLLM behind ``RolloutService`` and ``EngineControlService``."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Runs the command; answers its exit status. vLLM is imported only here, after the configuration is read."""
    from vime_rollout.engine._command import run

    return run(argv)
