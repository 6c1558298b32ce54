"""What one rank puts into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vime_trainer.checkpoint import _random_state
from vime_trainer.checkpoint._boxes import Box
from vime_trainer.checkpoint._manifest import entries_of
from vime_trainer.checkpoint._models import Trained, optimizer_values, shards_of
from vime_trainer.checkpoint._shards import Shard
from vime_trainer.checkpoint._state import RunState

__all__ = ["RANDOM", "Snapshot", "take"]

RANDOM = "random"


@dataclass(frozen=True)
class Snapshot:
    """One rank's part.

    Attributes:
        step: of the run.
        files: keys and tensors by file name; each file has one writer.
        listed: this rank's part of the manifest.
        names: of all tensors that this rank has a part of, written by it or not.
        content: what is the same on all ranks.
        random: this rank's random states, what is not a tensor.
        bytes: of all its tensors.
    """

    step: int
    files: dict[str, list[tuple[str, Tensor]]]
    listed: dict[str, Any]
    names: list[str]
    content: dict[str, Any]
    random: dict[str, Any]
    bytes: int


def take(models: Mapping[str, Trained], state: RunState, rank: int, copy: bool) -> Snapshot:
    """Describes what this rank writes: its shards of which it is the main replica, and its random states.

    Args:
        models: by name; names become parts of file names.
        state: where the run stands.
        rank: of this process.
        copy: copies all of it to the host, so that training may go on; else tensors stay live views.

    Raises:
        ValueError: a name with a slash, or a model that Megatron cannot describe.
    """
    tensors, values = _random_state.capture()
    groups: dict[str, list[Shard]] = {
        RANDOM: [
            Shard(f"{RANDOM}/{rank}/{name}", tuple(value.shape), Box.whole(value.shape), value)
            for name, value in tensors.items()
        ]
    }
    names = set()
    for name, trained in models.items():
        if not name or "/" in name or name == RANDOM:
            raise ValueError(f"models: {name!r} cannot be the name of a model in a checkpoint")
        for shard in shards_of(name, trained):
            names.add(shard.name)
            if shard.main:
                groups.setdefault(".".join(shard.name.split("/")[:2]), []).append(shard)
    files, listed = {}, {}
    for group, shards in groups.items():
        file = f"{group}-{rank:05d}.safetensors"
        files[file], part = entries_of(shards, file)
        listed |= part
    if copy:
        files = {file: [(key, _copied(value)) for key, value in entries] for file, entries in files.items()}
    content = {
        "state": asdict(state),
        "models": {
            name: {"optimizer": None if trained.optimizer is None else optimizer_values(trained.optimizer)}
            for name, trained in models.items()
        },
    }
    size = sum(value.numel() * value.element_size() for entries in files.values() for _, value in entries)
    return Snapshot(state.step, files, listed, sorted(names), content, values, size)


def _copied(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
