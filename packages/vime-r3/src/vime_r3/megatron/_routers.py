"""The routers of one Megatron model, by global layer number."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, MultiTokenPredictionLayer

from vime_proto.errors import ContractError


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers such as Float16Module and DistributedDataParallel."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def find_routers(model: torch.nn.Module) -> dict[int, TopKRouter]:
    """Routers of the decoder layers that this model really has, by global layer number counted from 0, ascending.

    Multi-token prediction has layer numbers of its own and no engine's routes: its routers are left alone.

    Raises:
        ContractError: a router whose choice cannot be replaced, or two of the same layer.
    """
    found: dict[int, TopKRouter] = {}
    for name, router in _decoder_routers(model, ""):
        _check(name, router)
        layer = router.layer_number - 1
        if layer in found:
            raise ContractError(
                "model", f"has two routers of layer {layer}, the second at {name}: attach to one decoder"
            )
        found[layer] = router
    return dict(sorted(found.items()))


def _decoder_routers(module: torch.nn.Module, name: str):
    if isinstance(module, MultiTokenPredictionBlock | MultiTokenPredictionLayer):
        return
    if isinstance(module, TopKRouter):
        yield name, module
    for child_name, child in module.named_children():
        yield from _decoder_routers(child, f"{name}.{child_name}" if name else child_name)


def _check(name: str, router: TopKRouter) -> None:
    config = router.config
    if router.layer_number is None:
        raise ContractError(name, "has no layer number: it is part of no decoder layer")
    refused = {
        "moe_router_fusion": bool(config.moe_router_fusion),
        "moe_router_load_balancing_type='sinkhorn'": router.routing_type == "sinkhorn",
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_force_load_balancing": bool(config.moe_router_force_load_balancing),
        "moe_enable_routing_replay": bool(getattr(config, "moe_enable_routing_replay", False)),
    }
    for setting, present in refused.items():
        if present:
            raise ContractError(f"config.{setting}", f"must be off: {name} would not take replayed routes from here")
    if router.router_replay is not None:
        raise ContractError(name, "is replayed already: detach the other replay first")
