"""Brings each token to its experts and back where all experts of a layer are on one rank: gathers, no host wait."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from vime_trainer.fused import fuse, switches

__all__ = ["GatherDispatcher", "plan_rows", "use_gathers"]


def use_gathers(model: torch.nn.Module) -> None:
    """Gives the MoE layers of a built model this dispatcher where no other rank shares their experts.

    Megatron picks dispatchers by a name in its config, so there is no place for it in a layer spec.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer) and type(layer.token_dispatcher) is MoEAllGatherTokenDispatcher:
            old = layer.token_dispatcher
            if switches.dispatch and old.tp_size == old.ep_size == 1:
                layer.token_dispatcher = GatherDispatcher(
                    old.num_local_experts, old.local_expert_indices, layer.config, _Groups(old)
                )


class _Groups:
    """The process groups that a dispatcher was made with."""

    def __init__(self, dispatcher: MoEAllGatherTokenDispatcher) -> None:
        self.ep, self.expt_tp, self.tp_ep = dispatcher.ep_group, dispatcher.tp_group, dispatcher.tp_ep_group


class GatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's all-gather dispatcher with another way to sort rows by expert, for one rank that has all experts.

    Megatron's way scatters the experts' outputs by atomic additions in the element type, and waits for the GPU three
    times a layer to learn the sizes of its masks. Here every token has exactly top-k rows, so sizes are known, and each
    token gathers its own rows and adds them in float32, in ascending order of the experts, and rounds once.
    """

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the experts, rows of each expert (int64 [experts], on the device), and the weight of each row."""
        self._source, self._places, counts, weights = plan_rows(self.routing_map, probs, self.router_topk)
        self.routing_map = None
        return _Dispatch.apply(hidden_states, self._source, self._places), counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum of each token's rows."""
        source, places = self._source, self._places
        self._source = self._places = None
        return _Combine.apply(hidden_states, source, places)


def plan_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts (token, expert) pairs by expert, then by token.

    A token with fewer than top_k experts gets rows of weight 0 in their place.

    Args:
        routing_map: bool [tokens, experts], at most top_k true a row.
        probs: [tokens, experts], weights of the chosen.
        top_k: experts a token.

    Returns:
        int64 [rows], token of each row; int64 [tokens, top_k], rows of each token; int64 [experts], rows of each expert;
        [rows], weight of each row, differentiable.
    """
    tokens, experts = routing_map.shape
    falling = torch.arange(experts, 0, -1, device=routing_map.device, dtype=torch.int32)
    found = (routing_map * falling).topk(top_k).values
    ids = (experts - found).clamp_(max=experts - 1).long()
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.zeros(experts, dtype=torch.int64, device=order.device).scatter_add_(0, flat, torch.ones_like(flat))
    weights = (probs.gather(1, ids) * (found > 0)).flatten().index_select(0, order)
    return order // top_k, places.view(tokens, top_k), counts, weights


class _Dispatch(torch.autograd.Function):
    """[tokens, hidden] to [rows, hidden]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_sum(grad, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    """[rows, hidden] to [tokens, hidden]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return _gather_sum(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


@fuse("dispatch")
def _gather_sum(rows: Tensor, places: Tensor) -> Tensor:
    """[tokens, hidden]: sum over each token's rows, in float32."""
    return rows[places].float().sum(1).to(rows.dtype)
