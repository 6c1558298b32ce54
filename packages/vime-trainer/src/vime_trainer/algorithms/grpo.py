"""GRPO (arXiv:2402.03300), with the sample standard deviation and asymmetric clipping."""

from __future__ import annotations

from ._groups import centred
from ._objectives import token_clipped_loss
from ._types import Algorithm, RolloutBatch


def advantage(batch: RolloutBatch, settings) -> dict:
    """(reward - group mean) / (group sample std + 1e-6) on every trainable token."""
    return {"advantages": batch.per_token(centred(batch, scale_by_std=True))}


GRPO = Algorithm("grpo", advantage, token_clipped_loss, aggregation="sequence")
