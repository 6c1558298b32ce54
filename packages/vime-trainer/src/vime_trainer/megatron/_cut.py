"""Marks of weights that tensor parallelism cuts, which Megatron sets only where it also initialises weights."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)

__all__ = ["mark_cut_weights"]


def mark_cut_weights(model: torch.nn.Module) -> None:
    """Without the mark a weight counts as copied, and the gradient norm leaves out the parts of all ranks but the first."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        weight = getattr(module, "weight", None)
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
