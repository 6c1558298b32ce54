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

__all__ = ["Slot", "layouts", "slots"]


@dataclass(frozen=True)
class Slot:
    """One parameter, or a range of one, that this rank's optimizer updates.

    Attributes:
        param: the model's parameter.
        span: the elements of the flattened parameter that this rank updates; None is all of them.
        main: what the inner optimizer updates: the parameter itself, a view of it, or float32 master weights.
        state: the inner optimizer's state of it, live; empty before the first update.
    """

    param: Tensor
    span: tuple[int, int] | None
    main: Tensor
    state: dict[str, Any]

    @property
    def has_master(self) -> bool:
        """Whether `main` is a copy with its own values."""
        return self.main.untyped_storage().data_ptr() != self.param.untyped_storage().data_ptr()


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
    return Layout(key, shape, local, tuple(blocks), tensor, first, not any(replica), parts[0].allow_shape_mismatch)


def slots(inner: Any) -> Iterator[Slot]:
    """What a Megatron optimizer updates on this rank, chained or not, distributed or not."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for one in getattr(inner, "chained_optimizers", [inner]):
        if getattr(one, "is_stub_optimizer", False):
            continue
        if isinstance(one, DistributedOptimizer):
            yield from _distributed(one)
            continue
        state = one.optimizer.state
        masters = {id(param): param for param in one.get_parameters()}
        for group, mains in zip(getattr(one, "float16_groups", []), _masters(one), strict=True):
            for param, main in zip(group, mains, strict=True):
                masters.pop(id(main))
                yield Slot(param, None, main, state[main])
        for param in masters.values():
            yield Slot(param, None, param, state[param])


def _masters(optimizer: Any) -> list[list[Tensor]]:
    return getattr(optimizer, "fp32_from_float16_groups", [])


def _distributed(optimizer: Any) -> Iterator[Slot]:
    for param in optimizer.model_param_gbuf_map:
        span = optimizer._get_model_param_range_map(param)["param"]
        group, order = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        yield Slot(param, (span.start, span.end), main, optimizer.optimizer.state[main])
