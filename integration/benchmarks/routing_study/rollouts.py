"""What an engine generated, as the trainer's batches, and how far two lots of log-probs are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime_trainer.packed import PackedBatch, ReplayRows, pack
from vime_trainer.policy import Policy

__all__ = ["Rollouts", "difference", "score"]

BATCH_TOKENS = 16384


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Sequences of one length.

    Attributes:
        tokens: int64 [sequences, length].
        logprobs: float64 [sequences, generated], the engine's.
        routes: [sequences, length - 1, layers, top_k], or None.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray | None

    @classmethod
    def load(cls, file: Path) -> Rollouts:
        """From a file that engine.py wrote."""
        data = np.load(file)
        return cls(data["tokens"].astype(np.int64), data["logprobs"], data["routes"] if "routes" in data else None)

    def first(self, count: int) -> Rollouts:
        """The first sequences."""
        return Rollouts(
            self.tokens[:count], self.logprobs[:count], None if self.routes is None else self.routes[:count]
        )

    def late(self) -> Rollouts:
        """The same with each token's routes one row late, which is wrong."""
        return dataclasses.replace(self, routes=np.roll(self.routes, 1, axis=1))

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def parts(self, tokens: int) -> Iterator[Rollouts]:
        """Whole sequences, about so many tokens at a time."""
        step = max(1, tokens // self.length)
        for start in range(0, len(self.tokens), step):
            end = start + step
            routes = None if self.routes is None else self.routes[start:end]
            yield Rollouts(self.tokens[start:end], self.logprobs[start:end], routes)

    def batch(self, replay: bool, measure: bool = False) -> PackedBatch:
        """All sequences, packed; the last token of each has no row."""
        batch = pack([torch.from_numpy(one) for one in self.tokens])
        if not replay or self.routes is None:
            return batch
        ids = np.concatenate([self.routes, np.zeros_like(self.routes[:, :1])], axis=1)
        valid = np.tile(np.arange(self.length) < self.length - 1, len(self.tokens))
        layers = tuple(range(ids.shape[2]))
        return dataclasses.replace(batch, routes=ReplayRows(ids.reshape(-1, *ids.shape[2:]), valid, layers, measure))


def score(
    policy: Policy, rollouts: Rollouts, replay: bool, measure: bool = False, tokens: int = BATCH_TOKENS
) -> tuple[np.ndarray, dict[str, Any] | None]:
    """The trainer's log-probs, float64 as the engine's, and with `measure` how much it would have routed otherwise."""
    found, flips, flipped, rows = [], np.zeros(0), 0, 0
    for part in rollouts.parts(tokens):
        with torch.no_grad():
            out = policy(part.batch(replay, measure))
        logprobs = out.logprobs.double().cpu().numpy().reshape(part.tokens.shape)
        found.append(logprobs[:, part.length - part.logprobs.shape[1] :])
        if measure and replay:
            counts = out.usage.flips.cpu().numpy()
            flips = counts if not rows else flips + counts
            flipped += int(out.usage.flipped.sum())
            rows += len(part.tokens) * (part.length - 1)
    if not rows:
        return np.concatenate(found), None
    share = flips / rows
    return np.concatenate(found), {
        "layers": [round(float(one), 4) for one in share],
        "token_layers": round(float(share.mean()), 4),
        "tokens": round(flipped / rows, 4),
    }


def difference(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Absolute difference of log-probs in nats: mean, 99th percentile, largest; k3 estimate of KL; share above log 2."""
    delta = one - other
    size, clipped = np.abs(delta), np.clip(delta, -20, 20)
    values = {
        "mean": size.mean(),
        "p99": np.quantile(size, 0.99),
        "max": size.max(),
        "kl": (np.exp(clipped) - clipped - 1).mean(),
        "above_log2": (size > np.log(2)).mean(),
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}
