"""One layout's parameters, memory by kind, and arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vime_trainer.models import Architecture, Entry, Family, HfConfig, expand, family_of, padded_vocab
from vime_trainer.plan import _activations, _flops, _parameters
from vime_trainer.plan._activations import GPU_KERNELS, Kernels, Tokens
from vime_trainer.plan._layout import Layout

__all__ = ["Plan", "StageMemory", "Workload", "make_plan"]

_CHUNK_BYTES = 1 << 30
"""Most bytes of float32 logits that the head holds at once on a GPU."""


@dataclass(frozen=True)
class Workload:
    """What is trained on.

    Attributes:
        micro_batch_tokens: tokens of a micro-batch.
        step_tokens: tokens of an optimizer step, over all data-parallel ranks; None is one micro-batch for each.
        sequence_length: mean tokens of a sequence, for the cost of attention; None is a whole micro-batch.
        dtype: of weights and activations.
        recompute: only the inputs of layers are kept for the backward pass.
        distributed: each data-parallel rank keeps a part of the optimizer's state.
        cpu_offload: the optimizer's state is in host memory.
    """

    micro_batch_tokens: int = 16384
    step_tokens: int | None = None
    sequence_length: int | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: bool = False
    distributed: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each GPU of one pipeline stage.

    Attributes:
        stage: counted from 0.
        layers: decoder layers.
        parameters: trained parameters on a GPU.
        weights: of the element type; frozen numbers in float32.
        gradients: float32 sums.
        optimizer: moments and, for bfloat16, float32 master weights.
        activations: kept for the backward pass, over all micro-batches under way.
        logits: the head's chunk of logits with its gradients, and the gradient of the head; of the last stage.
        working: the larger of a layer that is recomputed and the gradient of the largest parameter.
        host: bytes in host memory for each GPU.
        in_flight: micro-batches whose activations are kept at once.
    """

    stage: int
    layers: int
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    host: float
    in_flight: float

    @property
    def total(self) -> float:
        """The peak: what is resident, and the larger of the two temporary parts."""
        resident = self.weights + self.gradients + self.optimizer + self.activations
        return resident + max(self.logits, self.working)


@dataclass(frozen=True)
class Plan:
    """See `make_plan`.

    Attributes:
        family: of the model.
        layout: as checked.
        workload: as given, with `step_tokens` and `sequence_length` filled in.
        parameters, active: of the model; `active` are those that a token meets.
        stages: memory by pipeline stage.
        micro_batches: of each data-parallel rank in a step.
        flops: of one token, forward.
    """

    family: str
    layout: Layout
    workload: Workload
    parameters: int
    active: int
    stages: tuple[StageMemory, ...]
    micro_batches: int
    flops: _flops.Flops

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def step_flops(self) -> float:
        """Forward and backward of a step over all GPUs, without what is computed twice."""
        return self.flops.training * (self.workload.step_tokens or 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes and operations as whole numbers."""
        tokens = self.workload.step_tokens or 0
        stages = [dataclasses.asdict(stage) | {"total": stage.total} for stage in self.stages]
        return {
            "family": self.family,
            "layout": dataclasses.asdict(self.layout),
            "workload": dataclasses.asdict(self.workload),
            "parameters": {"total": self.parameters, "active": self.active},
            "micro_batches": self.micro_batches,
            "stages": [
                # Of interleaved stages a part of the layers is under way, which is no whole number.
                {key: value if key == "in_flight" else round(value) for key, value in stage.items()}
                for stage in stages
            ],
            "worst_stage": self.worst.stage,
            "flops": {
                "per_token_forward": {key: round(value) for key, value in dataclasses.asdict(self.flops).items()},
                "step": round(self.step_flops),
                "step_executed": round(self.flops.executed(self.workload.recompute) * tokens),
                "step_per_gpu": round(self.step_flops / self.layout.gpus),
            },
        }


def make_plan(
    config: HfConfig, parallel: Any, gpus: int, workload: Workload = Workload(), kernels: Kernels = GPU_KERNELS
) -> Plan:
    """Works out one layout.

    Not counted: the CUDA context and NCCL's buffers (about 1 to 2 GiB), what the allocator cannot use, routes that are
    spread unevenly.

    Args:
        config: of the model.
        parallel: a ParallelConfig.
        gpus: number of trainer processes.
        workload: what is trained on.
        kernels: ways of computing.

    Raises:
        ValueError: sizes that do not divide; names the field and the valid values.
    """
    family = family_of(config)
    arch = family.architecture(config)
    layout = Layout.of(parallel, gpus, arch)
    table = expand(family.weights, arch)
    step = workload.step_tokens or workload.micro_batch_tokens * layout.data
    length = workload.sequence_length or workload.micro_batch_tokens
    workload = dataclasses.replace(workload, step_tokens=step, sequence_length=length)
    micro = max(1, math.ceil(step / (workload.micro_batch_tokens * layout.data)))
    stages = tuple(_stage(family, arch, table, layout, workload, kernels, micro, n) for n in range(layout.pipeline))
    return Plan(
        family=family.name,
        layout=layout,
        workload=workload,
        parameters=_parameters.total(table),
        active=_parameters.active(table, arch),
        stages=stages,
        micro_batches=micro,
        flops=_flops.per_token(arch, length),
    )


def _stage(
    family: Family,
    arch: Architecture,
    table: Sequence[Entry],
    layout: Layout,
    workload: Workload,
    kernels: Kernels,
    micro_batches: int,
    stage: int,
) -> StageMemory:
    found = _parameters.on_stage(table, arch, layout, stage)
    width = 2 if workload.dtype == "bfloat16" else 4
    state = _optimizer_bytes(found, layout, workload)
    layers = layout.stage_layers(stage)
    tokens = Tokens.of(workload.micro_batch_tokens, layout)
    first, last = stage == 0, stage == layout.pipeline - 1
    each = [
        _activations.layer_bytes(arch, layout, tokens, width, kernels, moe=layer in arch.moe_layers) for layer in layers
    ]
    kept = sum(each)
    working = float(found.largest * width)
    if workload.recompute:
        kept = len(layers) * _activations.layer_input_bytes(arch, tokens, width)
        working = max(working, max(each))
    flying = _in_flight(layout, stage, micro_batches)
    outer = _activations.outer_bytes(arch, layout, tokens, width, kernels, first, last)
    return StageMemory(
        stage=stage,
        layers=len(layers),
        parameters=found.trained,
        weights=found.trained * width + found.frozen * 4,
        gradients=found.trained * 4,
        optimizer=0.0 if workload.cpu_offload else state,
        activations=flying * (kept + outer),
        logits=_logit_bytes(arch, layout, tokens, width) if last else 0.0,
        working=working,
        # Offloaded state comes with a copy of the gradients.
        host=state + state / 3 if workload.cpu_offload else 0.0,
        in_flight=flying,
    )


def _optimizer_bytes(found: _parameters.Parameters, layout: Layout, workload: Workload) -> float:
    """Two moments, and master weights where the weights are not float32 themselves."""
    each = 12 if workload.dtype == "bfloat16" else 8
    if not workload.distributed:
        return float(found.trained * each)
    return each * (found.dense / (layout.data * layout.context) + found.expert / layout.expert_data)


def _in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches under way at once on a stage of Megatron's 1F1B schedules, in units of all layers of the stage."""
    if layout.pipeline == 1:
        return 1.0
    if layout.virtual == 1:
        return float(min(micro_batches, layout.pipeline - stage))
    rounds = math.ceil(micro_batches / layout.pipeline) * layout.pipeline
    chunks = (layout.pipeline - stage - 1) * 2 + (layout.virtual - 1) * layout.pipeline + 1
    return min(rounds * layout.virtual, chunks) / layout.virtual


def _logit_bytes(arch: Architecture, layout: Layout, tokens: Tokens, width: int) -> float:
    """A chunk of float32 logits with its gradient, and the float32 gradient of the head."""
    columns = padded_vocab(arch.vocab, layout.tensor) // layout.tensor
    rows = min(tokens.here, max(1, _CHUNK_BYTES // (4 * columns)))
    return rows * columns * (4 + width) + columns * arch.hidden * (4 + width)
