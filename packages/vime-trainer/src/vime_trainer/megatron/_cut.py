"""Marks of weights that tensor parallelism cuts, which Megatron sets only where it also initialises weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["mark_cut_weights", "mark_expert_weights"]


def mark_cut_weights(model: torch.nn.Module) -> None:
    """Without the mark a weight counts as copied, and the gradient norm leaves out the parts of all ranks but the first."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            mark_expert_weights(module.experts.parameters(), module.config)
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        weight = getattr(module, "weight", None)
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def mark_expert_weights(weights: Iterable[torch.nn.Parameter], config: TransformerConfig) -> None:
    """Says of routed experts' weights which ranks hold the same part of them."""
    spread = config.expert_model_parallel_size > 1
    for weight in weights:
        # Megatron's data parallelism reduces such weights over another group: ranks that hold the same experts.
        weight.allreduce = not spread and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        # No other rank of the group in which gradient norms are added up holds the same part.
        weight.tensor_model_parallel = True
