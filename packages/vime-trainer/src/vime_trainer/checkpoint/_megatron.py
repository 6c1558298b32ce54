"""Megatron's sharded state dicts and optimizers, as layouts and slots.

Megatron's `dist_checkpointing.save` itself is not used: it accepts no common strategy but its own, which pickles, checks
shards with `all_gather_object`, which pickles, and refuses flattened ranges. Its ShardedTensor is the description here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime_trainer.checkpoint._boxes import Box, unravel
from vime_trainer.checkpoint._shards import Block, Layout
from vime_trainer.models import stored_key

__all__ = ["Slot", "layouts", "settle", "slots"]


@dataclass(frozen=True)
class Slot:
    """One parameter, or a range of one, that this rank's optimizer updates.

    Attributes:
        param: the model's parameter.
        span: the elements of the flattened parameter that this rank updates; None is all of them.
        main: what the inner optimizer knows it by: the parameter itself, a view of it, or a copy in float32.
        master: float32 weights with values of their own; None where there are none.
        state: the inner optimizer's state of it, live; empty before the first update.
        device: where moments live; the host when they are offloaded.
        count_device: where step counts live.
    """

    param: Tensor
    span: tuple[int, int] | None
    main: Tensor
    master: Tensor | None
    state: dict[str, Any]
    device: torch.device
    count_device: torch.device


def layouts(sharded: Any) -> Iterator[Layout]:
    """Layouts of all tensors of a model's sharded state dict, nested in any way; a tied weight comes once.

    Raises:
        ValueError: a factory that copies instead of giving views; names the tensor.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    seen = set()
    for entry in _leaves(sharded):
        if isinstance(entry, ShardedTensorFactory):
            with torch.no_grad():
                parts = list(_leaves(entry.build()))
        elif isinstance(entry, ShardedTensor):
            parts = [entry]
        else:
            continue  # Transformer Engine's extra states, empty without 8-bit floats
        if id(entry.data) in seen:
            continue
        seen.add(id(entry.data))
        yield _layout(entry.key, entry.data, parts)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _layout(key: str, tensor: Tensor, parts: list[Any]) -> Layout:
    extra = len(parts[0].global_shape) - tensor.dim()
    local = (1,) * extra + tuple(tensor.shape)
    blocks = []
    for part in parts:
        same = part.data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if not same or part.key != key or part.data.dim() != tensor.dim() or not tensor.is_contiguous():
            raise ValueError(f"{key}: its shards are not views of one contiguous parameter")
        start = unravel(part.data.storage_offset() - tensor.storage_offset(), local)
        blocks.append(Block(Box(start, (1,) * extra + tuple(part.data.shape)), tuple(part.global_offset)))
    replica = parts[0].replica_id
    replica = (replica,) if isinstance(replica, int) else tuple(replica)
    # Megatron numbers replicas as (pipeline, tensor, data parallel with context).
    first = not any(replica[:-1]) if len(replica) == 3 else not any(replica)
    shape = tuple(parts[0].global_shape)
    return Layout(
        stored_key(key), shape, local, tuple(blocks), tensor, first, not any(replica), parts[0].allow_shape_mismatch
    )


def slots(inner: Any) -> Iterator[Slot]:
    """What a Megatron optimizer updates on this rank, chained or not, distributed or not, offloaded or not."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for one in _chained(inner):
        distributed = isinstance(one, DistributedOptimizer)
        for param, span, main in _distributed(one) if distributed else _plain(one):
            master = getattr(one.optimizer, "param_to_fp32_param", {}).get(main)
            if master is None and main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
                master = main
            yield Slot(param, span, main, master, one.optimizer.state[main], *_devices(one.optimizer, main))


def settle(inner: Any) -> None:
    """Hands restored states and weights on to the optimizers on the host that work in an offloading one."""
    for whole in (one.optimizer for one in _chained(inner)):
        for part in getattr(whole, "sub_optimizers", ()):
            for copy in (param for group in part.param_groups for param in group["params"]):
                main = whole.inner_param_to_orig_param[copy]
                if main not in whole.param_to_fp32_param:
                    copy.detach().copy_(main.detach())
                part.state[copy] = whole.state[main]


def _chained(inner: Any) -> Iterator[Any]:
    for one in getattr(inner, "chained_optimizers", [inner]):
        # An optimizer without parameters on this rank has no optimizer inside.
        if not getattr(one, "is_stub_optimizer", False):
            yield one


def _plain(optimizer: Any) -> Iterator[tuple[Tensor, None, Tensor]]:
    masters = {id(main): main for main in optimizer.get_parameters()}
    low = getattr(optimizer, "float16_groups", [])
    for group, mains in zip(low, getattr(optimizer, "fp32_from_float16_groups", []), strict=True):
        for param, main in zip(group, mains, strict=True):
            yield param, None, masters.pop(id(main))
    for param in masters.values():
        yield param, None, param


def _distributed(optimizer: Any) -> Iterator[tuple[Tensor, tuple[int, int], Tensor]]:
    for param in optimizer.model_param_gbuf_map:
        span = optimizer._get_model_param_range_map(param)["param"]
        group, order = optimizer.model_param_group_index_map[param]
        yield param, (span.start, span.end), optimizer.optimizer.param_groups[group]["params"][order]


def _devices(optimizer: Any, main: Tensor) -> tuple[torch.device, torch.device]:
    home = getattr(optimizer, "param_to_inner_param", {}).get(main, main).device
    # torch's fused implementations count where they compute, the others on the host.
    fused = any(getattr(optimizer, "defaults", {}).get(flag) for flag in ("fused", "capturable"))
    return home, home if fused else torch.device("cpu")
