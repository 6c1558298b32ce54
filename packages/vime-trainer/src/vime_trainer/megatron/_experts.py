"""Routed experts with stacked weights: torch's grouped matrix product on a GPU, one product an expert on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

__all__ = ["StackedExperts"]


class StackedExperts(MegatronModule):
    """Takes the place of Megatron's SequentialMLP, whose many small modules cost more than their arithmetic.

    Parameters:
        fc1: [experts, 2 * width, hidden], each expert's gate rows, then its up rows.
        fc2: [experts, hidden, width].
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config)
        self.count = num_local_experts
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.fc1 = torch.nn.Parameter(torch.empty(self.count, 2 * width, hidden, **place))
        self.fc2 = torch.nn.Parameter(torch.empty(self.count, hidden, width, **place))
        for weight in (self.fc1, self.fc2):
            # Megatron's data parallelism reduces expert weights over another group when experts are spread.
            weight.allreduce = config.expert_model_parallel_size == 1

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Runs each expert on its share.

        Args:
            tokens: [rows, hidden], sorted by expert.
            tokens_per_expert: int64 [experts] on the host.
            probs: [rows], weight of each row's expert.

        Returns:
            [rows, hidden], weighted; and no bias.
        """
        multiply = _grouped if tokens.is_cuda and tokens.dtype == torch.bfloat16 else _looped
        gate, up = multiply(tokens, self.fc1, tokens_per_expert).chunk(2, dim=-1)
        # As Megatron's MLP does: weights are applied before the second product.
        middle = (silu(gate) * up * probs.unsqueeze(-1)).to(tokens.dtype)
        return multiply(middle, self.fc2, tokens_per_expert), None

    def backward_dw(self) -> None:
        """Megatron's delayed weight gradients are not used here."""


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(device=rows.device, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def _looped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ one.t() for part, one in zip(parts, weight.unbind(0), strict=True)])
