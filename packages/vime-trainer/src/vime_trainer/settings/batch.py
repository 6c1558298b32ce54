"""The table [batch] of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime_proto.settings import Section

__all__ = ["BatchSettings"]


class BatchSettings(Section):
    """How many groups a batch has, and how it is cut."""

    groups: int = Field(32, ge=1, description="groups in a batch")
    group_size: int = Field(8, ge=1, description="rollouts in a group")
    token_budget: int = Field(16384, ge=1, description="most tokens of a micro-batch; a longer sample goes alone")
    layout: Literal["packed", "padded"] = Field(
        "packed", description="padded: sequences of a micro-batch share one length"
    )
    optimizer_steps: int = Field(1, ge=1, description="optimizer steps a batch, each on a part of its groups")
    max_attempts: int | None = Field(None, ge=1, description="attempts after which the buffer drops a prompt")
    epochs: int | None = Field(None, ge=1, description="passes over the prompts; absent repeats for ever")
    fetch_samples: int = Field(256, ge=1, description="samples asked for in one fetch")
    max_refused: int = Field(3, ge=1, description="batches in a row with a refused sample before the run fails")
