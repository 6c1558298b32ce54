"""The table [critic] of the configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vime_proto.settings import Section
from vime_trainer.settings.optimizer import OptimizerSettings

__all__ = ["CriticSettings"]


class CriticSettings(Section):
    """The model that estimates values, for algorithms that need one. Its formulas are in [algorithm]."""

    model: Path | None = Field(
        None,
        description="Hugging Face folder that it starts from, a policy's or a critic's; absent takes the run's model",
    )
    head_std: float = Field(
        0.0,
        ge=0,
        description="deviation of the value head's random weights, where the folder has none; 0 values all alike",
    )
    optimizer_steps: int = Field(
        4,
        ge=1,
        description="optimizer steps over a batch, each on a part of its groups; the policy has its own, in [batch]",
    )
    epochs: int = Field(1, ge=1, description="passes over a batch, each of `optimizer_steps`")
    warmup_batches: int = Field(0, ge=0, description="first batches of the run, in which the critic alone is trained")
    optimizer: OptimizerSettings = Field(
        OptimizerSettings(learning_rate=1e-5), description="[critic.optimizer], as [optimizer]"
    )
