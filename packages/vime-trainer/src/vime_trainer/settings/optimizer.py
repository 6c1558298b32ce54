"""Settings of the optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vime_proto.settings import Section

__all__ = ["OptimizerSettings"]


class OptimizerSettings(Section):
    """The `[optimizer]` table."""

    kind: Literal["adamw", "adam"] = Field(
        "adamw", description="adamw decouples weight decay from the gradient, adam adds it to the gradient"
    )
    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the mean of squared gradients")
    epsilon: float = Field(1e-8, gt=0, description="added to the root of the mean square")
    weight_decay: float = Field(0.0, ge=0, description="of matrices; norms, biases and other vectors have none")
    clip_grad_norm: float = Field(1.0, ge=0, description="largest norm of the whole gradient; 0 does not clip")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field("constant", description="after the warm-up")
    warmup_updates: int = Field(0, ge=0, description="updates in which the learning rate rises linearly to its peak")
    minimum_ratio: float = Field(0.0, ge=0, le=1, description="last learning rate over the peak (not for constant)")
    total_updates: int | None = Field(None, ge=1, description="updates the schedule spans; default: those of the run")
    decay_updates: int | None = Field(None, ge=1, description="updates of the final decay of wsd")

    distributed: bool = Field(
        False, description="each data-parallel rank keeps and updates a part of moments and master weights"
    )
    cpu_offload: bool = Field(False, description="moments and master weights live and are updated in host memory (GPU)")

    @model_validator(mode="after")
    def _check(self) -> OptimizerSettings:
        if (self.schedule == "wsd") != (self.decay_updates is not None):
            raise ValueError("optimizer.decay_updates: needed for schedule 'wsd', and for no other")
        if self.cpu_offload and self.kind != "adamw":
            raise ValueError("optimizer.cpu_offload: Megatron has it for kind 'adamw' alone")
        if self.cpu_offload and not self.distributed:
            raise ValueError("optimizer.cpu_offload: Megatron has it for the distributed optimizer; set distributed")
        return self
