"""RMSNorm that works under sequence parallelism, which Megatron's wrapper of torch's norm refuses."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_trainer.megatron._rms import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(torch.nn.Module):
    """Takes the place of Megatron's WrappedTorchNorm; arguments are those of Megatron's norms.

    Under sequence parallelism each rank sees some of the tokens, and the norms of queries and keys see some of the heads:
    Megatron adds up the gradients of weights that carry `sequence_parallel` over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **place))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return rms_norm(hidden, self.weight, self.eps)
