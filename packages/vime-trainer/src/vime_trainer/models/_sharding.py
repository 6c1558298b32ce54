"""Which part of each weight a rank holds under tensor, expert and expert-tensor parallelism. Pure: no process groups.

Every part is a box of a Hugging Face tensor, so a rank reads no more of a checkpoint than it keeps, and its Megatron
parameter is the same change of layout of the boxes that the whole parameter is of the whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._weights import Entry

__all__ = ["Box", "Place", "boxes", "check_place", "join", "local_shape", "merge", "padded_vocab", "shard", "unshard"]

Box = tuple[slice, ...]
"""One slice a dimension, without steps."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the groups that weights are cut over; by default it holds all of them.

    Attributes:
        tensor_rank, tensor_size: tensor parallelism of everything but routed experts.
        expert_rank, expert_size: expert parallelism; each rank holds consecutive experts.
        expert_tensor_rank, expert_tensor_size: tensor parallelism within routed experts.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("tensor", "expert", "expert_tensor"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank: {rank}; valid: 0 to {size - 1}")


def check_place(arch: Architecture, place: Place) -> None:
    """Refuses sizes that do not divide what they cut.

    Raises:
        ValueError: names the first, and the key of config.json that it must divide.
    """
    wanted = [("tensor", place.tensor_size, "num_key_value_heads", arch.kv_heads)]
    if len(arch.moe_layers) < arch.layers:
        wanted += [("tensor", place.tensor_size, "intermediate_size", arch.ffn)]
    if arch.shared_ffn:
        wanted += [("tensor", place.tensor_size, "width of the shared experts", arch.shared_ffn)]
    if arch.moe_layers:
        wanted += [
            ("expert", place.expert_size, "number of experts", arch.experts),
            ("expert_tensor", place.expert_tensor_size, "moe_intermediate_size", arch.expert_ffn),
        ]
    for key, size, what, count in wanted:
        if count % size:
            raise ValueError(f"parallel.{key}: {size} does not divide the model's {what} of {count}")
    if not arch.moe_layers and place.expert_size * place.expert_tensor_size > 1:
        key, size = max(
            ("expert", place.expert_size), ("expert_tensor", place.expert_tensor_size), key=lambda one: one[1]
        )
        raise ValueError(f"parallel.{key}: {size}, but the model has no experts; valid: 1")


def padded_vocab(vocab: int, tensor_size: int) -> int:
    """Rows of the embedding and of the head over all tensor-parallel ranks: the next multiple of their number."""
    return -(-vocab // tensor_size) * tensor_size


def boxes(entry: Entry, place: Place = Place()) -> list[tuple[str, Box]]:
    """Name and box of every Hugging Face tensor that this rank holds a part of, in the order that `merge` takes.

    The last boxes of a padded vocabulary are short or empty.
    """
    rank, size = _cut_over(entry, place)
    first, last = 0, len(entry.hf)
    if entry.experts:
        each = last // place.expert_size
        first, last = place.expert_rank * each, (place.expert_rank + 1) * each
    found = []
    for name, shape in zip(entry.hf[first:last], entry.shapes[first:last], strict=True):
        box = [slice(0, length) for length in shape]
        dim = _dimension(entry)
        if dim is not None:
            part = -(-shape[dim] // size)
            start = min(rank * part, shape[dim])
            box[dim] = slice(start, min(start + part, shape[dim]))
        found.append((name, tuple(box)))
    return found


def merge(entry: Entry, parts: Sequence[Tensor], arch: Architecture, place: Place = Place()) -> Tensor:
    """The boxes of a rank to its Megatron parameter; rows that pad a vocabulary are 0."""
    local = entry.rule.merge(parts, arch)
    if entry.cut == "vocabulary":
        lacking = padded_vocab(entry.shapes[0][0], place.tensor_size) // place.tensor_size - local.shape[0]
        if lacking:
            local = torch.cat([local, local.new_zeros(lacking, *local.shape[1:])])
    return local


def local_shape(entry: Entry, arch: Architecture, place: Place = Place()) -> tuple[int, ...]:
    """Shape of a rank's Megatron parameter."""
    parts = [torch.empty([s.stop - s.start for s in box], device="meta") for _, box in boxes(entry, place)]
    return tuple(merge(entry, parts, arch, place).shape)


def shard(entry: Entry, whole: Tensor, arch: Architecture, place: Place) -> Tensor:
    """A rank's part of a whole Megatron parameter, as a model of one process has it."""
    tensors = dict(zip(entry.hf, entry.rule.split(whole, arch), strict=True))
    return merge(entry, [tensors[name][box] for name, box in boxes(entry, place)], arch, place)


def join(entry: Entry, shards: Sequence[Tensor], arch: Architecture, place: Place) -> list[Tensor]:
    """The Hugging Face tensors of an entry, in the order of `entry.hf`, from the ranks' parameters.

    Args:
        shards: by tensor-parallel rank; for routed experts by expert rank, and within one by expert-tensor rank. One, of
            any rank, for what is not cut.
        place: of any rank; its sizes are read.

    Raises:
        ValueError: another number of parameters.
    """
    size = _cut_over(entry, place)[1]
    holders = place.expert_size if entry.experts else 1
    if len(shards) != size * holders:
        raise ValueError(f"{entry.megatron}: {len(shards)} parts; valid: {size * holders}")
    dim = _dimension(entry)
    tensors: list[Tensor] = []
    for holder in range(holders):
        ranks = [entry.rule.split(one, arch) for one in shards[holder * size : (holder + 1) * size]]
        tensors += ranks[0] if size == 1 else [torch.cat(parts, dim=dim) for parts in zip(*ranks, strict=True)]
    if entry.cut == "vocabulary":
        tensors = [tensor[: shape[0]] for tensor, shape in zip(tensors, entry.shapes, strict=True)]
    return tensors


def unshard(entry: Entry, shards: Sequence[Tensor], arch: Architecture, place: Place) -> Tensor:
    """The whole Megatron parameter from the ranks' parts; arguments and errors as of `join`."""
    return entry.rule.merge(join(entry, shards, arch, place), arch)


def _cut_over(entry: Entry, place: Place) -> tuple[int, int]:
    """Rank and size of the group that the entry's tensors are cut over."""
    if entry.cut == "none":
        return 0, 1
    if entry.experts:
        return place.expert_tensor_rank, place.expert_tensor_size
    return place.tensor_rank, place.tensor_size


def _dimension(entry: Entry) -> int | None:
    return {"none": None, "columns": 0, "rows": 1, "vocabulary": 0}[entry.cut]
