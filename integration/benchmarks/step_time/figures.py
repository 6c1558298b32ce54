"""Figures of a run from what its trainer reported, and the memory of the GPUs meanwhile."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from shapes import Job

SKIPPED = 2
"""First steps, in which kernels are compiled."""
_KEPT = ("train_rollout_logprob_abs_diff/mean", "train_rollout_logprob_abs_diff/max", "publish/spool_seconds",
         "publish/update_seconds", "publish/bytes", "staleness/mean", "response_tokens/mean", "tokens", "grad_norm")  # fmt: skip


def summary(rows: list[dict[str, Any]], job: Job, staleness: int) -> dict[str, Any]:
    """Medians over the steps after the first ``SKIPPED``.

    ``steps`` says how many those are. ``seconds`` is from the end of one step to the end of the next, whatever happens between
    them; ``parts`` are the trainer's own measurements. A part that another one contains is not listed twice.
    """
    seconds = [round(after["time"] - before["time"], 3) for before, after in zip(rows, rows[1:], strict=False)]
    values = [row["values"] for row in rows[SKIPPED:]]
    kept = seconds[SKIPPED - 1 :]
    step = statistics.median(kept)
    parts = {
        name.removeprefix("seconds/"): round(_median(values, name), 3)
        for name in sorted({name for row in values for name in row if name.startswith("seconds/")})
    }
    found = {
        "seconds": round(step, 3), "steps": len(kept), "all_seconds": seconds, "parts": parts,
        "generated_tokens_per_second": round(job.generated / step),
    }  # fmt: skip
    if staleness == 0 and parts.get("wait"):
        # The trainer waits for all of the generation and for nothing else.
        found["generated_tokens_per_second_while_waiting"] = round(job.generated / parts["wait"])
    return found | {name: _median(values, name) for name in _KEPT if any(name in row for row in values)}


def _median(values: list[dict[str, float]], name: str) -> float:
    return statistics.median(row.get(name, 0.0) for row in values)


class GpuMemory:
    """The most memory in use on each GPU, as nvidia-smi sees it twice a second; nothing where there is none."""

    def __init__(self) -> None:
        self.peak_gib: list[float] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[GpuMemory]:
        """Watches from here to the end of the block."""
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join(10)

    def _watch(self, stop: threading.Event) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not stop.wait(0.5):
            try:
                text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
                now = [round(float(line) / 1024, 1) for line in text.split()]
            except (OSError, ValueError, subprocess.SubprocessError):
                return
            self.peak_gib = [max(pair) for pair in zip(now, self.peak_gib or now, strict=True)]
