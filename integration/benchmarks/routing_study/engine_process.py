"""Starts engine.py and talks to it. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["EngineProcess"]

_SCRIPT = Path(__file__).with_name("engine.py")


class EngineProcess:
    """A process with one engine; several can start at once."""

    def __init__(self, python: str, name: str, work: Path, model: Path, cache_gib: float, *flags: str) -> None:
        self.name = name
        self._log = work / f"engine-{name}.log"
        command = [python, str(_SCRIPT), "--model", str(model), "--cache-gib", str(cache_gib), *flags]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )

    def ready(self, seconds: float = 300) -> dict[str, Any]:
        """Waits until it takes requests; its first line."""
        return self._answer(seconds)

    def ask(self, what: str, seconds: float = 300, **values: Any) -> dict[str, Any]:
        """One request; RuntimeError with the engine's words when it fails, dies or takes longer than `seconds`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer(seconds)

    def stop(self) -> None:
        """Ends it and its engine core, and nothing else: they are a process group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            tail = self._log.read_text(errors="replace")[-1500:]
            why = "ended" if ready else f"gave no answer within {seconds:.0f} s"
            raise RuntimeError(f"engine {self.name} {why}: {tail}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"engine {self.name}: {answer['error']}")
        return answer
