"""One layout's parameters, memory by kind, and arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vime_trainer.megatron._alignment import check_grouped_experts
from vime_trainer.models import Architecture, Entry, HfConfig, expand, family_of, padded_vocab
from vime_trainer.plan import _activations, _flops, _parameters
from vime_trainer.plan._activations import GPU_KERNELS, Kernels, Tokens
from vime_trainer.plan._layout import Layout

__all__ = ["CriticWorkload", "Plan", "StageMemory", "Workload", "make_plan"]

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
class CriticWorkload:
    """A critic beside the policy, trained on the same batches.

    Attributes:
        config: of its model; None is the policy's.
        distributed, cpu_offload: of its own optimizer, as in Workload.
        epochs: passes over a batch.
    """

    config: HfConfig | None = None
    distributed: bool = False
    cpu_offload: bool = False
    epochs: int = 1


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each GPU of one pipeline stage, for one model.

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
    def resident(self) -> float:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def passing(self) -> float:
        """What is there at the peak of a pass: activations, and the larger of the two temporary parts."""
        return self.activations + max(self.logits, self.working)

    @property
    def total(self) -> float:
        """The peak of this model alone."""
        return self.resident + self.passing


@dataclass(frozen=True)
class Plan:
    """See `make_plan`.

    Attributes:
        family: of the model.
        layout: as checked.
        workload: as given, with `step_tokens` and `sequence_length` filled in.
        parameters, active: of the model; `active` are those that a token meets.
        stages: memory by pipeline stage, of the policy.
        micro_batches: of each data-parallel rank in a step.
        flops: of one token, forward.
        others: "reference" and "critic", where there are such: memory by pipeline stage.
        critic_flops: of one token through the critic, forward; None without one.
        critic_epochs: its passes over a batch, forward and backward; one more forward makes its values.
    """

    family: str
    layout: Layout
    workload: Workload
    parameters: int
    active: int
    stages: tuple[StageMemory, ...]
    micro_batches: int
    flops: _flops.Flops
    others: Mapping[str, tuple[StageMemory, ...]] = field(default_factory=dict)
    critic_flops: _flops.Flops | None = None
    critic_epochs: int = 1

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: self.total(stage.stage))

    def total(self, stage: int) -> float:
        """Bytes at the peak on each GPU of a stage: of all models what is resident, and the largest of their passes."""
        models = [self.stages[stage], *(stages[stage] for stages in self.others.values())]
        return sum(one.resident for one in models) + max(one.passing for one in models)

    def host(self, stage: int) -> float:
        """Bytes in host memory for each GPU of a stage, of all models."""
        return sum(stages[stage].host for stages in (self.stages, *self.others.values()))

    @property
    def step_flops(self) -> float:
        """Forward and backward of a step over all GPUs, without what is computed twice."""
        return self.flops.training * (self.workload.step_tokens or 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes and operations as whole numbers."""
        tokens = self.workload.step_tokens or 0
        return {
            "family": self.family,
            "layout": dataclasses.asdict(self.layout),
            "workload": dataclasses.asdict(self.workload),
            "parameters": {"total": self.parameters, "active": self.active},
            "micro_batches": self.micro_batches,
            "stages": _rounded(self.stages),
            "others": {name: _rounded(stages) for name, stages in self.others.items()},
            "totals": [round(self.total(stage.stage)) for stage in self.stages],
            "worst_stage": self.worst.stage,
            "flops": {
                "per_token_forward": {key: round(value) for key, value in dataclasses.asdict(self.flops).items()},
                "step": round(self.step_flops),
                "step_executed": round(self.flops.executed(self.workload.recompute) * tokens),
                "step_per_gpu": round(self.step_flops / self.layout.gpus),
                **{name: round(flops) for name, flops in self.other_flops().items()},
            },
        }

    def other_flops(self) -> dict[str, float]:
        """Operations of a step over all GPUs that the other models add, by model."""
        tokens, found = self.workload.step_tokens or 0, {}
        if "reference" in self.others:
            found["reference"] = tokens * self.flops.forward
        if self.critic_flops is not None:
            found["critic"] = tokens * (self.critic_flops.forward + self.critic_epochs * self.critic_flops.training)
        return found


def _rounded(stages: Sequence[StageMemory]) -> list[dict[str, Any]]:
    return [
        # Of interleaved stages a part of the layers is under way, which is no whole number.
        {key: value if key == "in_flight" else round(value) for key, value in stage.items()}
        for stage in (dataclasses.asdict(one) | {"total": one.total} for one in stages)
    ]


def make_plan(
    config: HfConfig,
    parallel: Any,
    gpus: int,
    workload: Workload = Workload(),
    kernels: Kernels = GPU_KERNELS,
    reference: bool = False,
    critic: CriticWorkload | None = None,
) -> Plan:
    """Works out one layout.

    The models of a run make their passes one after the other: their weights, gradients and optimizers add up, their
    activations do not. A pass without gradients, such as the reference's, keeps nothing to speak of.

    Not counted: the CUDA context and NCCL's buffers (about 1 to 2 GiB), what the allocator cannot use, routes that are
    spread unevenly.

    Args:
        config: of the model.
        parallel: a ParallelConfig.
        gpus: number of trainer processes.
        workload: what is trained on.
        kernels: ways of computing.
        reference: whether there is a second policy, which is not trained, for the KL.
        critic: the value model beside it; None without one.

    Raises:
        ValueError: sizes that do not divide, or that the kernels of a GPU do not take; names the field and the valid
            values.
    """
    family = family_of(config)
    arch = family.architecture(config)
    layout = _layout(parallel, gpus, arch, workload)
    table = expand(family.weights, arch)
    step = workload.step_tokens or workload.micro_batch_tokens * layout.data
    length = workload.sequence_length or workload.micro_batch_tokens
    workload = dataclasses.replace(workload, step_tokens=step, sequence_length=length)
    micro = max(1, math.ceil(step / (workload.micro_batch_tokens * layout.data)))
    numbers = range(layout.pipeline)
    stages = tuple(_stage(arch, table, layout, workload, kernels, micro, n) for n in numbers)
    others: dict[str, tuple[StageMemory, ...]] = {}
    if reference:
        others["reference"] = tuple(_untrained(stage) for stage in stages)
    valued = None
    if critic is not None:
        work = dataclasses.replace(workload, distributed=critic.distributed, cpu_offload=critic.cpu_offload)
        valued, others["critic"] = _critic(critic.config or config, parallel, gpus, work, kernels, micro)
    return Plan(
        family=family.name,
        layout=layout,
        workload=workload,
        parameters=_parameters.total(table),
        active=_parameters.active(table, arch),
        stages=stages,
        micro_batches=micro,
        flops=_flops.per_token(arch, length),
        others=others,
        critic_flops=None if valued is None else _flops.per_token(valued, length, head=1),
        critic_epochs=1 if critic is None else critic.epochs,
    )


def _layout(parallel: Any, gpus: int, arch: Architecture, workload: Workload) -> Layout:
    layout = Layout.of(parallel, gpus, arch)
    if arch.moe_layers and workload.dtype == "bfloat16":
        check_grouped_experts(arch.hidden, arch.expert_ffn, layout.expert_tensor)
    return layout


def _untrained(stage: StageMemory) -> StageMemory:
    return dataclasses.replace(
        stage, gradients=0.0, optimizer=0.0, activations=0.0, logits=0.0, working=0.0, host=0.0, in_flight=0
    )


def _critic(
    config: HfConfig, parallel: Any, gpus: int, workload: Workload, kernels: Kernels, micro_batches: int
) -> tuple[Architecture, tuple[StageMemory, ...]]:
    from vime_trainer.value import critic_weights

    arch, table = critic_weights(family_of(config), config)
    layout = _layout(parallel, gpus, arch, workload)
    numbers = range(layout.pipeline)
    return arch, tuple(_stage(arch, table, layout, workload, kernels, micro_batches, n, values=True) for n in numbers)


def _stage(
    arch: Architecture,
    table: Sequence[Entry],
    layout: Layout,
    workload: Workload,
    kernels: Kernels,
    micro_batches: int,
    stage: int,
    values: bool = False,
) -> StageMemory:
    """`values`: the model has a value head in the place of the output head."""
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
    outer = _activations.outer_bytes(arch, layout, tokens, width, kernels, first, last, values)
    return StageMemory(
        stage=stage,
        layers=len(layers),
        parameters=found.trained,
        weights=found.trained * width + found.frozen * 4,
        gradients=found.trained * 4,
        optimizer=0.0 if workload.cpu_offload else state,
        activations=flying * (kept + outer),
        logits=_logit_bytes(arch, layout, tokens, width) if last and not values else 0.0,
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
