"""Weights and optimizer of a model under training, as shards to write and to fill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime_trainer import megatron
from vime_trainer.checkpoint._boxes import Box
from vime_trainer.checkpoint._megatron import Slot, layouts, settle, slots
from vime_trainer.checkpoint._shards import Layout, Shard

__all__ = [
    "OPTIMIZER",
    "WEIGHTS",
    "Trained",
    "layouts_of",
    "make_room",
    "optimizer_shards",
    "optimizer_values",
    "pairs",
    "set_optimizer_values",
    "shards_of",
]

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
MASTER = "master"
_COUNT = "step"
_HOST_COPY = "master_param"
"""An offloading optimizer's entry for its own copy, which is `Slot.main` or `Slot.master` again."""


@dataclass(frozen=True)
class Trained:
    """A model of a checkpoint.

    Attributes:
        policy: a Policy, or another model with `sharded_state_dict`.
        optimizer: its Optimizer; None for weights alone, as of a reference.
    """

    policy: Any
    optimizer: Any = None


def layouts_of(trained: Trained) -> list[Layout]:
    """How this rank's parameters and buffers lie in the whole model's."""
    with megatron.cuda_names():
        if hasattr(trained.policy, "sharded_state_dict"):
            return list(layouts(trained.policy.sharded_state_dict()))
        return list(layouts(trained.policy.model.sharded_state_dict()))


def shards_of(name: str, trained: Trained) -> Iterator[Shard]:
    """All that this rank holds of a model, main replica or not: "<name>/weights/...", "<name>/optimizer/<kind>/..."."""
    found = layouts_of(trained)
    for layout in found:
        yield from layout.shards(f"{name}/{WEIGHTS}/{layout.key}", layout.tensor, layout.main)
    for layout, slot in pairs(trained, found):
        for kind, value in _state_of(slot):
            yield from optimizer_shards(f"{name}/{OPTIMIZER}/{kind}/{layout.key}", layout, slot, value)


def pairs(trained: Trained, found: list[Layout]) -> Iterator[tuple[Layout, Slot]]:
    """Slots of the optimizer with the layout of their parameter.

    Raises:
        ValueError: the optimizer updates what the model does not describe.
    """
    if trained.optimizer is None:
        return
    by_param = {id(layout.tensor): layout for layout in found}
    for slot in slots(_inner(trained.optimizer)):
        if id(slot.param) not in by_param:
            raise ValueError(f"a parameter {list(slot.param.shape)} of the optimizer is in no sharded state dict")
        yield by_param[id(slot.param)], slot


def optimizer_shards(name: str, layout: Layout, slot: Slot, value: Tensor) -> Iterator[Shard]:
    """A moment, master weights or a step count of a slot."""
    # Ranges differ between the ranks of a distributed optimizer, so each is written by the rank that has it.
    main = layout.main if slot.span is None else layout.first
    if value.dim() == 0:
        yield Shard(name, (), Box((), ()), value, main and layout.holds_first_element(slot.span))
    else:
        yield from layout.shards(name, value, main, slot.span)


def _state_of(slot: Slot) -> Iterator[tuple[str, Tensor]]:
    for kind, value in slot.state.items():
        if kind != _HOST_COPY:
            yield kind, torch.as_tensor(value)
    if slot.master is not None:
        yield MASTER, slot.master


def make_room(slot: Slot, kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[str, Tensor]]:
    """Gives a slot an empty state and its master weights the values of the model's.

    Args:
        slot: what an optimizer updates.
        kinds: shape and dtype of each stored kind; a shape of () is a count that every rank keeps.

    Returns:
        What is to be filled, by kind.
    """
    slot.state.clear()
    found = []
    for kind, (shape, dtype) in kinds.items():
        if kind == MASTER:
            continue
        if shape == ():
            slot.state[kind] = torch.zeros((), dtype=dtype, device=slot.count_device)
        else:
            slot.state[kind] = torch.zeros(slot.main.shape, dtype=dtype, device=slot.device)
        found.append((kind, slot.state[kind]))
    if slot.master is not None:
        flat = slot.param.detach().view(-1)
        slot.master.detach().view(-1).copy_(flat if slot.span is None else flat[slice(*slot.span)])
        if MASTER in kinds:
            found.append((MASTER, slot.master.detach()))
    return found


def optimizer_values(optimizer: Any) -> dict[str, Any]:
    """Counts that are the same on all ranks."""
    values = {"updates": optimizer.updates, "skipped": optimizer.skipped}
    steps = {int(group[_COUNT]) for group in _inner(optimizer).param_groups if _COUNT in group}
    # Fused implementations count per group instead of per parameter.
    return values | ({_COUNT: steps.pop()} if len(steps) == 1 else {})


def set_optimizer_values(optimizer: Any, values: dict[str, Any]) -> None:
    """Restores what `optimizer_values` gave; the last thing that is restored of an optimizer."""
    settle(_inner(optimizer))
    optimizer.updates, optimizer.skipped = values["updates"], values["skipped"]
    if _COUNT in values:
        for group in _inner(optimizer).param_groups:
            group[_COUNT] = values[_COUNT]


def _inner(optimizer: Any) -> Any:
    """Megatron's optimizer."""
    return optimizer._inner
