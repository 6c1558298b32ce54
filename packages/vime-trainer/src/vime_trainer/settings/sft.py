"""Settings of supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vime_proto.settings import Section, Settings
from vime_trainer.profiler import ProfilerSettings
from vime_trainer.settings.checkpoint import CheckpointSettings
from vime_trainer.settings.common import Ranks, TransformerEngineUse
from vime_trainer.settings.metrics import MetricsSettings
from vime_trainer.settings.optimizer import OptimizerSettings
from vime_trainer.settings.parallel import ParallelConfig

__all__ = ["DataSettings", "SftSettings"]


class DataSettings(Section):
    """The `[data]` table: rows and how they become tokens."""

    files: list[Path] = Field(min_length=1, description="JSONL files, read in this order")
    prompt_field: str = Field("prompt", description="text before the answer")
    response_field: str = Field("response", description="the answer, which is learnt")
    messages_field: str = Field("messages", description="chat turns instead of prompt and response")
    train_turns: Literal["all", "last"] = Field("all", description="assistant turns of a chat that are learnt")
    special_tokens: bool = Field(True, description="let the tokenizer add its special tokens to a prompt")
    append_eos: bool = Field(True, description="end a response with the tokenizer's end token")
    max_tokens: int | None = Field(None, ge=2, description="longest row; default: the model's limit")
    too_long: Literal["error", "drop"] = Field("error", description="what happens to longer rows")
    shuffle: bool = Field(True, description="another order in every epoch, from the seed")


class SftSettings(Settings):
    """`vime-trainer sft`."""

    model: Path = Field(description="Hugging Face folder to start from")
    output: Path = Field(description="folder of the run: metrics, checkpoints, final model")
    tokenizer: Path | None = Field(None, description="tokenizer folder; default: the model's")
    data: DataSettings
    run_id: str = Field("sft", description="name of the run in the metrics")
    steps: int | None = Field(None, ge=1, description="optimizer steps; or set epochs")
    epochs: int | None = Field(None, ge=1, description="passes over the data; or set steps")
    batch_size: int | None = Field(None, ge=1, description="rows a step; or set batch_tokens")
    batch_tokens: int | None = Field(None, ge=1, description="most tokens a step; or set batch_size")
    micro_batch_tokens: int = Field(
        16384, ge=1, description="most tokens in one forward pass; the gradient is the same"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="weights and activations")
    layout: Literal["packed", "padded"] = Field("packed", description="how a forward pass lays sequences out")
    recompute: bool = Field(False, description="recompute activations in the backward pass instead of keeping them")
    transformer_engine: TransformerEngineUse = "auto"
    ranks: Ranks = None
    parallel: ParallelConfig = ParallelConfig()
    seed: int = Field(0, ge=0, description="order of the data")
    log_interval: int = Field(10, ge=1, description="steps between lines on stderr; metrics have every step")
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    checkpoint: CheckpointSettings = CheckpointSettings()
    metrics: MetricsSettings = MetricsSettings()
    profiler: ProfilerSettings = ProfilerSettings()
    exit_with_parent: bool = Field(False, description="end when the parent process ends")

    @model_validator(mode="after")
    def _check(self) -> SftSettings:
        for one, other in (("steps", "epochs"), ("batch_size", "batch_tokens")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(f"{one}: exactly one of {one} and {other} must be set")
        return self
