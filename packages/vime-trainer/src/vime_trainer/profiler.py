"""Chrome traces of chosen steps, and of the next step on SIGUSR2."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from vime_proto.settings import Section

__all__ = ["Profiler", "ProfilerSettings", "requests_set"]

log = logging.getLogger(__name__)


class ProfilerSettings(Section):
    """The table [profiler]."""

    steps: list[int] = Field(default_factory=list, description="steps that are traced, counted from 1")
    folder: Path | None = Field(None, description="where traces go; default: <output>/traces")


class Profiler:
    """Decides which steps are traced, and traces them.

    Args:
        settings: the table [profiler].
        output: the run's folder.
        rank: of this process; every rank writes its own trace.
        requested: set by whoever wants the next step to be traced, such as `requests_set`.
    """

    def __init__(self, settings: ProfilerSettings, output: Path, rank: int, requested: threading.Event | None = None):
        self._steps = frozenset(settings.steps)
        self._folder = settings.folder or output / "traces"
        self._rank = rank
        self._requested = requested or threading.Event()

    def wants(self, step: int) -> bool:
        """Whether the step, which is about to begin, is traced. A request counts once."""
        asked = self._requested.is_set()
        self._requested.clear()
        return asked or step in self._steps

    @contextlib.contextmanager
    def trace(self, step: int, wanted: bool) -> Iterator[None]:
        """Traces what happens inside to `step-<step>-rank-<rank>.json`, for chrome://tracing or Perfetto."""
        if not wanted:
            yield
            return
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step:06d}-rank-{self._rank}.json"
        profile.export_chrome_trace(str(path))
        log.info("trace of step %d: %s", step, path)


@contextlib.contextmanager
def requests_set(event: threading.Event) -> Iterator[None]:
    """SIGUSR2 sets the event; only in the main thread, which gets signals."""
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, previous)
