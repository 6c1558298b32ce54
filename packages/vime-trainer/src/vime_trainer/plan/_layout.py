"""How many GPUs share what, and which sizes a model allows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from vime_trainer.models import Architecture

__all__ = ["Layout"]


class _Sizes(Protocol):
    tensor: int
    sequence: bool
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int

    def split_layers(self, layers: int) -> list[int]: ...


@dataclass(frozen=True)
class Layout:
    """The `[parallel]` table and the number of GPUs.

    Attributes:
        gpus: all of them.
        tensor, pipeline, virtual, context, expert, expert_tensor: as in `[parallel]`.
        sequence: whether tensor-parallel ranks share the tokens between matrices.
        data: ranks that hold the same weights outside of experts and get other samples.
        expert_data: ranks that hold the same experts.
        chunk_layers: decoder layers of each model chunk; chunk n is on stage n modulo `pipeline`.
    """

    gpus: int
    tensor: int
    sequence: bool
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    expert_data: int
    chunk_layers: tuple[int, ...]

    @classmethod
    def of(cls, config: _Sizes, gpus: int, arch: Architecture) -> Layout:
        """Checks a layout against a model.

        Raises:
            ValueError: a size that divides neither the GPUs nor the model; names the field and the valid values.
        """
        _check_model(config, arch)
        for others in (("tensor", "context"), ("expert", "expert_tensor")):
            left = gpus
            for name in ("pipeline", *others):
                size = getattr(config, name)
                if left % size:
                    taken = f" that are left of {gpus}" if left != gpus else ""
                    raise ValueError(f"parallel.{name}: {size} does not divide the {left} GPUs{taken}; {_valid(left)}")
                left //= size
        return cls(
            gpus=gpus,
            tensor=config.tensor,
            sequence=config.sequence and config.tensor > 1,
            pipeline=config.pipeline,
            virtual=config.virtual,
            context=config.context,
            expert=config.expert,
            expert_tensor=config.expert_tensor,
            data=gpus // (config.pipeline * config.tensor * config.context),
            expert_data=gpus // (config.pipeline * config.expert * config.expert_tensor),
            chunk_layers=tuple(config.split_layers(arch.layers)),
        )

    def stage_layers(self, stage: int) -> list[int]:
        """Global numbers of the layers of a pipeline stage, ascending."""
        ends = list(accumulate(self.chunk_layers, initial=0))
        chunks = range(stage, len(self.chunk_layers), self.pipeline)
        return [layer for chunk in chunks for layer in range(ends[chunk], ends[chunk + 1])]


def _check_model(config: _Sizes, arch: Architecture) -> None:
    wanted = [("tensor", arch.kv_heads, "key and value heads")]
    if len(arch.moe_layers) < arch.layers:
        wanted.append(("tensor", arch.ffn, "columns of the dense feed-forward part"))
    if arch.shared_ffn:
        wanted.append(("tensor", arch.shared_ffn, "columns of the shared experts"))
    wanted.append(("expert", arch.experts if arch.moe_layers else 1, "experts"))
    wanted.append(("expert_tensor", arch.expert_ffn if arch.moe_layers else 1, "columns of a routed expert"))
    for name, count, what in wanted:
        size = getattr(config, name)
        if count % size:
            raise ValueError(f"parallel.{name}: {size} does not divide the model's {count} {what}; {_valid(count)}")
    if config.virtual > 1 and config.pipeline == 1:
        raise ValueError(f"parallel.virtual: {config.virtual} needs pipeline stages; valid: 1 with pipeline = 1")
    for name, most in (("pipeline", arch.layers), ("virtual", arch.layers // config.pipeline)):
        if getattr(config, name) > most:
            raise ValueError(f"parallel.{name}: {getattr(config, name)}; valid: 1 to {most} for {arch.layers} layers")
    if arch.moe_layers and config.tensor > 1 and not config.sequence:
        raise ValueError("parallel.sequence: false; valid: true, which MoE layers need with parallel.tensor > 1")


def _valid(count: int) -> str:
    divisors = [size for size in range(1, min(count, 512) + 1) if count % size == 0]
    return "valid: " + ", ".join(str(size) for size in divisors[:16])
