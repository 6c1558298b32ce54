"""Floating-point operations of matrix products and attention; nothing else counts."""

from __future__ import annotations

from dataclasses import dataclass

from vime_trainer.models import Architecture

__all__ = ["Flops", "per_token"]


@dataclass(frozen=True)
class Flops:
    """Of one token, forward.

    Attributes:
        matrices: of the layers' matrices, with the experts that the token meets.
        attention: of scores and weighted values under the causal mask.
        head: of the output head.
    """

    matrices: float
    attention: float
    head: float

    @property
    def forward(self) -> float:
        """Forward alone."""
        return self.matrices + self.attention + self.head

    @property
    def training(self) -> float:
        """Forward and backward, as is usual: nothing that is computed twice counts."""
        return 3 * self.forward

    def executed(self, recompute: bool) -> float:
        """What is really computed: the head's logits once more, and with recompute the layers once more."""
        return self.training + self.head + (self.matrices + self.attention if recompute else 0.0)


def per_token(arch: Architecture, length: float, head: int | None = None) -> Flops:
    """Mean over the tokens of sequences of `length` tokens; `head`: rows of the output head, None for the vocabulary."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    mixing = arch.layers * arch.hidden * (2 * queries + 2 * keys)
    moe = len(arch.moe_layers)
    dense = (arch.layers - moe) * 3 * arch.hidden * arch.ffn
    wide = 3 * arch.hidden * (arch.top_k * arch.expert_ffn + arch.shared_ffn) + arch.hidden * arch.experts
    # Token i meets i + 1 keys: half of the square.
    attention = arch.layers * 4 * queries * length / 2
    return Flops(
        2.0 * (mixing + dense + moe * wide), attention, 2.0 * arch.hidden * (arch.vocab if head is None else head)
    )
