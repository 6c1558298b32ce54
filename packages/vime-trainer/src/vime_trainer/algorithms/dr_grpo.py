"""Dr. GRPO (arXiv:2503.20783): no division by the standard deviation, none by the response length."""

from __future__ import annotations

from ._groups import centred
from ._objectives import token_clipped_loss
from ._types import Algorithm, RolloutBatch


def advantage(batch: RolloutBatch, settings) -> dict:
    """reward - group mean."""
    return {"advantages": batch.per_token(centred(batch, scale_by_std=False))}


DR_GRPO = Algorithm("dr_grpo", advantage, token_clipped_loss, aggregation="constant")
