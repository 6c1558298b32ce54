"""The table [metrics] of the configuration."""

from __future__ import annotations

from pydantic import Field

from vime_proto.settings import Section

__all__ = ["MetricsSettings", "WandbSettings"]


class WandbSettings(Section):
    """Weights & Biases; needs the extra vime-trainer[wandb]."""

    project: str = Field(description="project")
    entity: str | None = Field(None, description="user or team")
    mode: str = Field("online", description="online, offline or disabled")


class MetricsSettings(Section):
    """Where a step's figures go."""

    jsonl: bool = Field(True, description="<output>/metrics.jsonl, a line a step")
    tensorboard: bool = Field(True, description="<output>/tensorboard")
    wandb: WandbSettings | None = Field(None, description="off when absent")
