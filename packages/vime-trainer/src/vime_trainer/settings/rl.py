"""Configuration of `vime-trainer rl`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vime_proto.errors import ContractError
from vime_proto.settings import Section, ServerSettings, Settings
from vime_trainer.algorithms import AlgorithmSettings, check_correction, get_algorithm
from vime_trainer.profiler import ProfilerSettings
from vime_trainer.settings.batch import BatchSettings
from vime_trainer.settings.checkpoint import CheckpointSettings
from vime_trainer.settings.client import ClientSettings
from vime_trainer.settings.common import Ranks, TransformerEngineUse
from vime_trainer.settings.critic import CriticSettings
from vime_trainer.settings.metrics import MetricsSettings
from vime_trainer.settings.optimizer import OptimizerSettings
from vime_trainer.settings.parallel import ParallelConfig
from vime_trainer.settings.weights import WeightsSettings

__all__ = ["AlarmSettings", "EvaluationSettings", "RlSettings"]


class EvaluationSettings(Section):
    """One evaluation set of the buffer, and when it is run."""

    set: str = Field(description="name of the set in the buffer's configuration")
    interval: int | None = Field(None, ge=1, description="batches between evaluations; absent for none in between")
    at_start: bool = Field(True, description="before the first batch of this process, also when it resumes")
    at_end: bool = Field(True, description="after the last batch")
    wait: bool = Field(
        True, description="train on only when the result is there; else the weights may change meanwhile"
    )
    deadline_seconds: float = Field(3600.0, gt=0, description="after which the result covers what there is")
    rollouts_per_prompt: int = Field(0, ge=0, description="0 takes the set's")
    max_prompts: int = Field(0, ge=0, description="only the first so many prompts; 0 for all")


class AlarmSettings(Section):
    """Alarm on the log-prob difference between trainer and engine."""

    factor: float = Field(5.0, gt=1, description="alarm above factor x the median of earlier steps")
    floor: float = Field(
        1e-3, ge=0, description="no alarm below this mean, in nats; below ten times it for a single sequence"
    )
    action: Literal["warn", "fail"] = Field("warn", description="fail ends the run before the batch is trained")


class RlSettings(Settings):
    """`vime-trainer rl`: reinforcement learning from a buffer, or from a folder of exported batches."""

    run_id: str = Field("run", description="name of the run; letters, digits, dot, dash, underscore")
    model: Path = Field(description="Hugging Face folder that the run starts from")
    output: Path = Field(description="folder of the run: metrics, checkpoints")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and activations")
    recompute: bool = Field(False, description="recompute activations in the backward pass instead of keeping them")
    transformer_engine: TransformerEngineUse = "auto"
    ranks: Ranks = None
    parallel: ParallelConfig = ParallelConfig()
    buffer: str | None = Field(None, description="host:port of the buffer")
    router: str | None = Field(None, description="host:port of the router that lists the engines")
    import_batches: Path | None = Field(
        None, description="train from this folder of exported batches, without a buffer"
    )
    export_batches: Path | None = Field(None, description="write every leased batch to this folder")
    max_steps: int | None = Field(None, ge=1, description="batches of the whole run, restored ones included")
    seed: int = Field(0, ge=0, description="order of the prompts, random numbers")
    max_staleness: int = Field(0, ge=0, description="batches that a sample may lag behind; 0 is on-policy")
    publish_interval: int = Field(1, ge=1, description="batches between two weight updates")
    r3: Literal["replay", "record", "off"] = Field(
        "off",
        description="replay the engine's expert routes, or record those of the trainer's old policy and replay them in "
        "the optimizer steps of the batch (R2)",
    )
    replay_check_interval: int = Field(
        10, ge=0, description="steps between measurements without replay and with shifted routes; 0 for none"
    )
    export_model: bool = Field(True, description="write the trained model to <output>/final at the end")
    buffer_retry_seconds: float = Field(120.0, ge=0, description="for which an unreachable buffer is tried")
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    batch: BatchSettings = BatchSettings()
    weights: WeightsSettings = WeightsSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluations: list[EvaluationSettings] = Field(default_factory=list, description="[[evaluations]]")
    alarm: AlarmSettings = AlarmSettings()
    metrics: MetricsSettings = MetricsSettings()
    metrics_port: int | None = Field(None, ge=0, le=65535, description="port for Prometheus; off when absent")
    profiler: ProfilerSettings = ProfilerSettings()
    client: ClientSettings = ClientSettings()
    server: ServerSettings = ServerSettings()
    address_file: Path | None = Field(None, description="host:port is written here once bound")
    exit_with_parent: bool = Field(False, description="end when the parent process ends")
    metrics_wait_seconds: float = Field(
        0.0, ge=0, description="after a clean end, wait so long for a reader of the metrics when none has come yet"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RlSettings:
        for fault in (self._sources(), self._schedule()):
            if fault:
                raise ValueError(fault)
        algorithm = get_algorithm(self.algorithm.name)
        if algorithm.needs_group and self.batch.group_size < 2:
            raise ValueError(
                f"batch.group_size: {self.batch.group_size} rollout has no group to compare with, which "
                f"{algorithm.name} needs; use at least 2"
            )
        a = self.algorithm
        if self.r3 == "record" and a.old_policy != "trainer" and self.batch.optimizer_steps > 1:
            raise ValueError(
                f'r3: "record" keeps the routes of the pass that scores the old policy, and old_policy "{a.old_policy}" makes '
                'none; set algorithm.old_policy = "trainer", or r3 = "replay"'
            )
        check_correction(a.old_policy, a.correction, self.max_staleness, a.uncorrected)
        return self

    def _sources(self) -> str | None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_id):
            return f"run_id: {self.run_id!r} must be letters, digits, dot, dash, underscore, and not begin with a sign"
        if (self.buffer is None) == (self.import_batches is None):
            return "buffer: set exactly one of buffer (host:port) and import_batches (a folder)"
        if self.buffer is not None and self.router is None:
            return "router: needed together with buffer; engines are found through it"
        if self.import_batches is not None and self.evaluations:
            return "evaluations: there is nobody to answer them with import_batches"
        for name in ("buffer", "router"):
            value = getattr(self, name)
            if value is not None:
                fault = _address_fault(value)
                if fault:
                    return f"{name}: {fault}"
        return None

    def _schedule(self) -> str | None:
        if self.max_staleness < self.publish_interval - 1:
            return (
                f"publish_interval: {self.publish_interval} needs max_staleness >= {self.publish_interval - 1}, "
                f"got {self.max_staleness}; otherwise no prompt could be granted between two publications"
            )
        return None

    def effective_lag(self) -> str:
        """How far samples may lag, in optimizer steps, for people."""
        steps = self.batch.optimizer_steps
        first, last = self.max_staleness * steps, (self.max_staleness + 1) * steps - 1
        return (
            f"max_staleness {self.max_staleness} x {steps} optimizer steps a batch: samples lag at most {first} optimizer "
            f"steps behind the weights at a batch's first step, {last} at its last"
        )


def _address_fault(value: str) -> str | None:
    from vime_proto.channel import split_address

    try:
        split_address(value)
    except ContractError as error:
        return str(error)
    return None
