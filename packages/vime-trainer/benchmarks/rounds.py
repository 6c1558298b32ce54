"""Things measured in turn, so that a machine that grows slower or faster slows all of them; and parts that fail alone."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from vime_trainer.packed import PackedBatch
from vime_trainer.policy import Policy

__all__ = ["Parts", "alternate", "clear", "peak_gib", "ratios", "synchronize", "timed_pass"]


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clear() -> None:
    """Gives back what nothing holds any more, and counts the peak of memory from here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Most memory of the GPU since it was last reset; 0 without one."""
    return torch.cuda.max_memory_allocated() / (1 << 30) if torch.cuda.is_available() else 0.0


def timed_pass(policy: Policy, batch: PackedBatch) -> tuple[float, float]:
    """Seconds of a forward pass with gradients, and of both passes."""
    synchronize()
    begin = time.perf_counter()
    out = policy(batch)
    synchronize()
    middle = time.perf_counter()
    out.logprobs.sum().backward()
    synchronize()
    end = time.perf_counter()
    for param in policy.parameters().values():
        param.grad = None
    return middle - begin, end - begin


class Parts:
    """Parts of a benchmark: one that fails says so and the next one runs; those that would begin too late are left out.

    Args:
        seconds: after which no part begins.

    Attributes:
        failed: names of parts that did.
    """

    def __init__(self, seconds: float) -> None:
        self.failed: list[str] = []
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until no part begins any more."""
        return self._end - time.monotonic()

    def run(self, name: str, part: Callable[[], None]) -> None:
        """Runs a part; an exception is shown and goes no further."""
        if self.left <= 0:
            print(f"# {name}: no time left", flush=True)
            return
        begin = time.monotonic()
        try:
            part()
        except Exception as error:
            self.failed.append(name)
            where = [line.strip() for line in traceback.format_exc().splitlines() if line.lstrip().startswith("File")]
            print(f"{name}: FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
            print("  " + "\n  ".join(where[-4:]), flush=True)
        print(f"# {name}: {time.monotonic() - begin:.1f} s", flush=True)

    def end(self) -> int:
        """Exit status: 1 where a part failed."""
        if self.failed:
            print(f"failed: {'; '.join(self.failed)}", flush=True)
        return int(bool(self.failed))


def alternate(
    runs: dict[str, Callable[[], Sequence[float]]], rounds: int, warm: int, left: Callable[[], float]
) -> dict[str, list[Sequence[float]]]:
    """What each of the runs returns in every round, the order turned round by round.

    Args:
        runs: by name; each times itself.
        rounds: that are kept; fewer where time runs out, but three at least.
        warm: rounds before them that are not.
        left: seconds left.
    """
    found: dict[str, list[Sequence[float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(warm + rounds):
        if number >= warm + 3 and left() <= 0:
            print(f"  (no time left after {number - warm} of {rounds} rounds)", flush=True)
            break
        shift = number % len(names)
        for name in (names[shift:] + names[:shift])[:: -1 if number // len(names) % 2 else 1]:
            seconds = runs[name]()
            if number >= warm:
                found[name].append(seconds)
    return found


def ratios(these: Sequence[float], those: Sequence[float]) -> str:
    """Median and quartiles of the ratio within each round."""
    paired = sorted(this / that for this, that in zip(these, those, strict=True))
    low, middle, high = statistics.quantiles(paired, n=4) if len(paired) > 1 else paired * 3
    return f"x {middle:.4f} (quartiles {low:.4f} to {high:.4f}, {len(paired)} pairs)"
