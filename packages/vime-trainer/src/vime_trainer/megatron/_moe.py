"""A mixture of experts in low precision with the sums where inference engines have theirs: gates and their sum in float32.

Megatron rounds the gates to the type of the activations and adds the experts' outputs one after the other in it, in no
fixed order on a GPU. Engines (vLLM's fused kernels) keep gates in float32 and round the sum over a token's experts once.
With bfloat16 the former is most of what remains between trainer and engine when routes are replayed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor

__all__ = ["Float32GateRouter", "sum_in_float32"]


class Float32GateRouter(TopKRouter):
    """A router whose logits are rounded as its configuration says and whose softmax and gates are float32 from there on."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits, float32 [..., experts]."""
        return super().gating(input).float()


def sum_in_float32(layer: MoELayer) -> None:
    """Makes a layer add the outputs of a token's experts in float32 and round once, in a fixed order.

    Does nothing for a dispatcher that it does not know.
    """
    dispatcher = layer.token_dispatcher
    if type(dispatcher) is MoEAllGatherTokenDispatcher:
        rounded = dispatcher.combine_postprocess
        dispatcher.combine_preprocess = functools.partial(_all_gather_sum, dispatcher)
        dispatcher.combine_postprocess = lambda sums: rounded(sums).to(dispatcher.config.params_dtype)
    elif type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.shared_experts is None:
        dispatcher.combine_postprocess = functools.partial(_all_to_all_sum, dispatcher)


def _all_gather_sum(dispatcher: Any, rows: Tensor) -> Tensor:
    """This rank's share of every token's sum, float32 [tokens, hidden]; other ranks of the group may hold more of it."""
    tokens = dispatcher.hidden_shape_before_permute[0]
    places = dispatcher.reversed_local_input_permutation_mapping
    if dispatcher.num_local_experts == dispatcher.config.num_moe_experts:
        return _sum(rows, places, tokens)
    sums = rows.new_zeros(tokens, rows.size(1), dtype=torch.float32)
    return sums.index_add(0, places, rows.float())


def _all_to_all_sum(dispatcher: Any, rows: Tensor) -> Tensor:
    tokens = dispatcher.hidden_shape_before_permute[0]
    sums = _sum(rows, dispatcher.reversed_local_input_permutation_mapping, tokens)
    return sums.to(rows.dtype).view(dispatcher.hidden_shape)


def _sum(rows: Tensor, places: Tensor, tokens: int) -> Tensor:
    return _SumRows.apply(rows, places, tokens)  # type: ignore[no-any-return]


class _SumRows(torch.autograd.Function):
    """float32 [tokens, hidden] sums of equally many rows a token; `places` int64 [rows] says whose each row is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.dtype = rows.dtype
        order = places.argsort(stable=True)
        return rows.index_select(0, order).view(tokens, -1, rows.size(1)).sum(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        return grad.to(ctx.dtype).index_select(0, places), None, None
