"""Moves weights between Hugging Face tensors and the parameters of a Megatron model, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from vime_proto.errors import nearest
from vime_trainer.models._architecture import Architecture
from vime_trainer.models._safetensors import TensorSpec
from vime_trainer.models._sharding import Box, Place, boxes, merge
from vime_trainer.models._te_names import PerExpert
from vime_trainer.models._weights import Entry

__all__ = ["check_names", "export", "fill", "ignored", "specs", "tensor_specs"]


def specs(entries: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in export order."""
    return {name: shape for entry in entries for name, shape in zip(entry.hf, entry.shapes, strict=True)}


def tensor_specs(entries: Iterable[Entry], dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Element type and shape of every Hugging Face tensor of a model whose weights are `dtype`, in export order."""
    return {
        name: TensorSpec(torch.float32 if entry.float32 else dtype, shape)
        for entry in entries
        for name, shape in zip(entry.hf, entry.shapes, strict=True)
    }


def export(entries: Iterable[Entry], params: Mapping[str, Tensor], arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and detached tensors of a model of one process; views of the parameters where layouts agree.

    A caller that keeps a tensor past the next optimizer step must copy it.
    """
    for entry in entries:
        parts = entry.rule.split(params[entry.megatron].detach(), arch)
        yield from zip(entry.hf, parts, strict=True)


def fill(
    entries: Iterable[Entry],
    params: Mapping[str, Tensor | PerExpert],
    arch: Architecture,
    read: Callable[[str, Box], Tensor],
    place: Place = Place(),
) -> None:
    """Sets this rank's parameters from parts of Hugging Face tensors, one parameter at a time.

    Args:
        entries: those of this rank's layers.
        params: by the names of the table.
        read: gives a box of the Hugging Face tensor of a name.
        place: of this rank.
    """
    for entry in entries:
        with torch.no_grad():
            params[entry.megatron].copy_(merge(entry, [read(*one) for one in boxes(entry, place)], arch, place))


def ignored(names: Iterable[str], arch: Architecture) -> set[str]:
    """Tensors that a folder may hold although the model has none such.

    Older tied checkpoints hold the head too; rotary frequencies follow from the config; layers for multi-token prediction
    lie behind the last layer, no more of them than the config says.
    """
    behind = range(arch.layers, arch.layers + arch.mtp_layers)
    prefixes = tuple(f"model.layers.{number}." for number in behind)
    return {
        name
        for name in names
        if name.endswith("rotary_emb.inv_freq")
        or (arch.tied and name == "lm_head.weight")
        or (prefixes and name.startswith(prefixes))
    }


def check_names(found: Collection[str], wanted: Collection[str], source: str) -> None:
    """Refuses a set of tensor names that is not exactly the model's.

    Raises:
        ValueError: names the first missing and the first extra tensor, with the nearest valid name.
    """
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
    if extra:
        # The whole list of valid names can be thousands long, so only the hint is kept.
        hint = nearest(extra[0], wanted, "tensor").partition(" valid: ")[0].rstrip("; ")
        problems.append(f"{len(extra)} tensors do not belong to the model: {hint}")
    if problems:
        raise ValueError(f"{source}: " + "; ".join(problems))
