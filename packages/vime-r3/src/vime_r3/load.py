"""How a trace spreads tokens over experts."""

from __future__ import annotations

import dataclasses

import numpy as np

from vime_r3.trace import Routes

__all__ = ["Load", "expert_load"]


@dataclasses.dataclass(frozen=True)
class Load:
    """Tokens of each expert.

    Attributes:
        layer_ids: global numbers of the layers.
        tokens: rows that were counted; holes are not.
        counts: int64 ``[layers, experts]``.
    """

    layer_ids: tuple[int, ...]
    tokens: int
    counts: np.ndarray

    @property
    def imbalance(self) -> np.ndarray:
        """Load of the busiest expert over the mean, float64 ``[layers]``; 1 is even, 0 when nothing was counted."""
        mean = self.counts.mean(axis=1)
        return np.divide(self.counts.max(axis=1), mean, out=np.zeros(len(mean)), where=mean > 0)

    @property
    def unused(self) -> np.ndarray:
        """Experts that no token chose, int64 ``[layers]``."""
        return (self.counts == 0).sum(axis=1)


def expert_load(routes: Routes) -> Load:
    """Counts the tokens of every expert in every layer."""
    ids = routes.ids[routes.valid]
    counts = [np.bincount(ids[:, layer].reshape(-1), minlength=routes.experts) for layer in range(ids.shape[1])]
    return Load(routes.layer_ids, len(ids), np.array(counts, dtype=np.int64))
