"""What a sequence costs to train on, by its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vime_trainer.models import Architecture


@dataclass(frozen=True)
class TokenCost:
    """linear x tokens + quadratic x tokens^2, in any unit.

    Attributes:
        linear: cost of a token whatever comes before it: projections, feed-forward parts, experts.
        quadratic: cost of causal attention, by the square of a sequence's length.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, lengths: Sequence[int]) -> np.ndarray:
        """float64 [S], of sequences with these lengths."""
        tokens = np.asarray(lengths, np.float64)
        return self.linear * tokens + self.quadratic * tokens * tokens

    @classmethod
    def of_architecture(cls, arch: Architecture) -> TokenCost:
        """FLOPs of a forward pass up to the output head, which only trainable tokens need.

        A multiplication and an addition for each weight that a token meets; of attention scores and their sum over values,
        the causal half.
        """
        attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads)
        moe = len(arch.moe_layers)
        dense = 3 * arch.hidden * arch.ffn
        experts = 3 * arch.hidden * (arch.top_k * arch.expert_ffn + arch.shared_ffn) + arch.hidden * arch.experts
        weights = arch.layers * attention + (arch.layers - moe) * dense + moe * experts
        return cls(linear=2.0 * weights, quadratic=2.0 * arch.layers * arch.heads * arch.head_dim)
