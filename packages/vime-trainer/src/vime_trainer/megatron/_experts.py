"""Routed experts with stacked weights: torch's grouped matrix product on a GPU, one product an expert on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_trainer.megatron._activation import weighted_swiglu
from vime_trainer.megatron._alignment import check_grouped_experts

__all__ = ["StackedExperts"]


class StackedExperts(MegatronModule):
    """Takes the place of Megatron's SequentialMLP, whose many small modules cost more than their arithmetic.

    Parameters:
        fc1: [experts, 2 * width, hidden], each expert's gate rows, then its up rows.
        fc2: [experts, hidden, width].

    Experts are those of this expert-parallel rank, their width is that of this expert-tensor-parallel rank: Megatron's
    dispatcher adds up the outputs of the latter.

    Raises:
        ValueError: sizes that the grouped product does not take, where it is going to be used.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config)
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        if _takes_grouped(torch.empty(0, **place)):
            check_grouped_experts(config.hidden_size, config.moe_ffn_hidden_size, config.expert_tensor_parallel_size)
        self.count = num_local_experts
        width, hidden = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size, config.hidden_size
        self.fc1 = torch.nn.Parameter(torch.empty(self.count, 2 * width, hidden, **place))
        self.fc2 = torch.nn.Parameter(torch.empty(self.count, hidden, width, **place))

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Runs each expert on its share.

        Args:
            tokens: [rows, hidden], sorted by expert.
            tokens_per_expert: int64 [experts], on the host or on the device.
            probs: [rows], weight of each row's expert.

        Returns:
            [rows, hidden], weighted; and no bias.
        """
        multiply = _grouped if _takes_grouped(tokens) else _looped
        # As Megatron's MLP does: weights are applied before the second product.
        middle = weighted_swiglu(multiply(tokens, self.fc1, tokens_per_expert), probs)
        return multiply(middle, self.fc2, tokens_per_expert), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: experts over expert-parallel ranks, widths over expert-tensor ranks."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        axis = len(sharded_offsets)
        tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
        tensor_size = self.config.expert_tensor_parallel_size
        experts = (axis, parallel_state.get_expert_model_parallel_rank(), self.config.expert_model_parallel_size)
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        common = {"replica_id": replica, "prepend_axis_num": axis}

        def halves(key: str, data: Tensor, *_: Any) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    half,
                    *sharded_offsets,
                    experts,
                    (axis + 1, number * tensor_size + tensor_rank, 2 * tensor_size),
                    **common,
                )
                for number, half in enumerate(data.chunk(2, dim=1))
            ]

        def whole(halves: list[Tensor]) -> Tensor:
            return torch.cat(halves, dim=1)

        names = {name: f"{prefix}{name}" for name in ("fc1", "fc2")}
        return {
            names["fc1"]: ShardedTensorFactory(names["fc1"], self.fc1, halves, whole, replica),
            names["fc2"]: ShardedTensor.from_rank_offsets(
                names["fc2"], self.fc2, *sharded_offsets, experts, (axis + 2, tensor_rank, tensor_size), **common
            ),
        }

    def backward_dw(self) -> None:
        """Megatron's delayed weight gradients are not used here."""


def _takes_grouped(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(device=rows.device, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def _looped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ one.t() for part, one in zip(parts, weight.unbind(0), strict=True)])
