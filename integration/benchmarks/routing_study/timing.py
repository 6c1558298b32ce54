"""Training passes with and without replay, alternating."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rollouts import BATCH_TOKENS, Rollouts

from vime_trainer.policy import Policy

__all__ = ["time_passes"]

_WARM, _ROUNDS = 2, 10


def time_passes(policy: Policy, rollouts: Rollouts) -> dict[str, Any]:
    """Milliseconds of a forward pass with gradients, and with its backward pass: median, smallest and largest."""
    part = next(rollouts.parts(BATCH_TOKENS))
    batches = {
        "without": part.batch(False),
        "replay": part.batch(True),
        "replay, flips counted": part.batch(True, measure=True),
    }
    forward: dict[str, list[float]] = {name: [] for name in batches}
    both: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(_WARM + _ROUNDS):
        for name in list(batches)[:: -1 if number % 2 else 1]:
            _wait()
            started = time.perf_counter()
            out = policy(batches[name])
            _wait()
            middle = time.perf_counter()
            out.logprobs.sum().backward()
            _wait()
            ended = time.perf_counter()
            for parameter in policy.parameters().values():
                parameter.grad = None
            if number >= _WARM:
                forward[name].append(middle - started)
                both[name].append(ended - started)
    return {
        "tokens": part.tokens.size,
        "forward_ms": {name: _milliseconds(values) for name, values in forward.items()},
        "forward_backward_ms": {name: _milliseconds(values) for name, values in both.items()},
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _milliseconds(seconds: list[float]) -> list[float]:
    return [round(1e3 * value, 2) for value in (statistics.median(seconds), min(seconds), max(seconds))]
