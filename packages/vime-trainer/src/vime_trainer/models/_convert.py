"""Moves weights between Hugging Face tensors and the parameters of a Megatron model, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from vime_proto.errors import nearest
from vime_trainer.models._architecture import Architecture
from vime_trainer.models._weights import Entry

__all__ = ["check_names", "export", "fill", "specs"]


def specs(entries: Sequence[Entry], params: Mapping[str, Tensor], arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in export order, without touching the weights."""
    empty = {name: torch.empty(param.shape, device="meta") for name, param in params.items()}
    return {name: tuple(tensor.shape) for name, tensor in export(entries, empty, arch)}


def export(entries: Iterable[Entry], params: Mapping[str, Tensor], arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and detached tensors, parameter by parameter; views of the parameters where layouts agree.

    A caller that keeps a tensor past the next optimizer step must copy it.
    """
    for entry in entries:
        parts = entry.rule.split(params[entry.megatron].detach(), arch)
        yield from zip(entry.hf, parts, strict=True)


def fill(
    entries: Iterable[Entry],
    params: Mapping[str, Tensor],
    arch: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> None:
    """Sets every parameter from Hugging Face tensors that `read` returns by name.

    Raises:
        ValueError: a tensor of another shape than the model's.
    """
    for entry in entries:
        parts = []
        for name in entry.hf:
            part = read(name)
            if tuple(part.shape) != shapes[name]:
                raise ValueError(f"tensor {name}: shape {tuple(part.shape)}; the model needs {shapes[name]}")
            parts.append(part)
        with torch.no_grad():
            params[entry.megatron].copy_(entry.rule.merge(parts, arch))


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
