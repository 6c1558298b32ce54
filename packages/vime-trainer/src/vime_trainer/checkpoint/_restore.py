"""Restoring: everything is checked on all ranks before anything is changed on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from vime_proto.errors import nearest
from vime_trainer.checkpoint import _random_state
from vime_trainer.checkpoint._communicator import Communicator, exchange
from vime_trainer.checkpoint._folders import CheckpointError
from vime_trainer.checkpoint._manifest import Stored
from vime_trainer.checkpoint._models import (
    OPTIMIZER,
    WEIGHTS,
    Trained,
    layouts_of,
    make_room,
    optimizer_shards,
    pairs,
    set_optimizer_values,
)
from vime_trainer.checkpoint._shards import Layout, Shard
from vime_trainer.checkpoint._snapshot import RANDOM
from vime_trainer.checkpoint._state import RunState
from vime_trainer.checkpoint._stored import StoredCheckpoint

__all__ = ["restore"]


def restore(path: str | Path, models: Mapping[str, Trained], ranks: Communicator) -> RunState:
    """Fills models and optimizers, cut over ranks in any way, from a checkpoint written by any number of ranks.

    With an optimizer among the models random states are restored too. A rank that the writing run did not have takes
    those of one that it had.

    Raises:
        CheckpointError: a checkpoint that is missing, damaged, or of other models, on any rank; all ranks raise it. Only
            where a file that was whole cannot be read any more, models may be filled in part.
    """
    error: Exception | None = None
    answer, found, stored = {}, {}, None
    try:
        stored = StoredCheckpoint(path)
        found = {name: layouts_of(trained) for name, trained in models.items()}
        for name, trained in models.items():
            _check(stored, name, trained, found[name])
        answer = {"identity": stored.identity, "seen": _mask(stored, found)}
    except (ValueError, OSError) as caught:
        error = caught
    answers = exchange(ranks, answer, error)
    error = None
    try:
        _compare(stored, models, answers)
        # Each file is verified once, by one of the ranks.
        stored.verify(stored.files_under(_prefixes(models))[ranks.rank :: ranks.size])
    except (ValueError, OSError) as caught:
        error = caught
    exchange(ranks, {}, error)
    error = None
    try:
        for name, trained in models.items():
            _fill(stored, name, trained, found[name])
        if any(trained.optimizer is not None for trained in models.values()):
            _restore_random(stored, ranks.rank)
    except (ValueError, OSError) as caught:
        error = caught
    exchange(ranks, {}, error)
    return RunState(**stored.content["state"])


def _prefixes(models: Mapping[str, Trained]) -> Iterator[str]:
    for name, trained in models.items():
        yield f"{name}/{WEIGHTS}/"
        if trained.optimizer is not None:
            yield f"{name}/{OPTIMIZER}/"
            yield f"{RANDOM}/"


def _check(stored: StoredCheckpoint, name: str, trained: Trained, found: list[Layout]) -> None:
    held = stored.content["models"]
    if name not in held:
        raise CheckpointError(f"{stored.path}: model: {nearest(name, held)}")
    if trained.optimizer is not None and held[name]["optimizer"] is None:
        raise CheckpointError(f"{stored.path}: holds weights of {name!r}, but no optimizer")
    for layout in found:
        for shard in layout.shards(f"{name}/{WEIGHTS}/{layout.key}", layout.tensor, layout.main):
            entry = stored.manifest.get(shard.name)
            if entry is None:
                raise CheckpointError(f"{stored.path}: another model: {layout.key!r} is in only one of the two")
            need = str(shard.data.dtype).removeprefix("torch.")
            if not _fits(shard, entry) or entry.dtype != need:
                have = f"{entry.dtype} {list(entry.shape)}"
                raise CheckpointError(
                    f"{stored.path}: another model: {layout.key} is {have}, the model needs {need} {list(shard.shape)}"
                )
    for layout, slot in pairs(trained, found):
        for kind, entry in stored.optimizer_kinds(name, layout.key).items():
            for shard in optimizer_shards("", layout, slot, slot.main.detach()):
                if entry.shape and not _fits(shard, entry):
                    have, need = list(entry.shape), list(shard.shape)
                    raise CheckpointError(f"{stored.path}: {kind} of {layout.key} is {have}, the model needs {need}")


def _fits(shard: Shard, entry: Stored) -> bool:
    if entry.shape == shard.shape:
        return True
    # Padding is less than a row a rank: a head over a vocabulary is not mistaken for one of another kind.
    alike = shard.flexible and len(entry.shape) == len(shard.shape) and entry.shape[1:] == shard.shape[1:]
    return alike and max(entry.shape[0], shard.shape[0]) < 2 * min(entry.shape[0], shard.shape[0])


def _mask(stored: StoredCheckpoint, found: Mapping[str, list[Layout]]) -> dict[str, str]:
    """By model, one bit for each stored weight that this rank has a part of."""
    masks = {}
    for name, held in found.items():
        mine = {f"{name}/{WEIGHTS}/{layout.key}" for layout in held}
        masks[name] = np.packbits([key in mine for key in stored.weights(name)]).tobytes().hex()
    return masks


def _compare(stored: StoredCheckpoint, models: Mapping[str, Trained], answers: list[dict]) -> None:
    if len({answer["identity"] for answer in answers}) > 1:
        raise CheckpointError(f"{stored.path}: ranks see different checkpoints there; do they share this folder?")
    for name in models:
        masks = [np.frombuffer(bytes.fromhex(answer["seen"][name]), dtype=np.uint8) for answer in answers]
        names = stored.weights(name)
        seen = np.unpackbits(np.bitwise_or.reduce(masks), count=len(names))
        for key in (key for key, held in zip(names, seen, strict=True) if not held):
            key = key.removeprefix(f"{name}/{WEIGHTS}/")
            raise CheckpointError(f"{stored.path}: another model: {key!r} is in only one of the two")


def _fill(stored: StoredCheckpoint, name: str, trained: Trained, found: list[Layout]) -> None:
    for layout in found:
        for shard in layout.shards(f"{name}/{WEIGHTS}/{layout.key}", layout.tensor, layout.main):
            stored.fill(shard.name, shard.box, shard.data)
    for layout, slot in pairs(trained, found):
        entries = stored.optimizer_kinds(name, layout.key)
        room = make_room(slot, {kind: (entry.shape, getattr(torch, entry.dtype)) for kind, entry in entries.items()})
        for kind, value in room:
            for shard in optimizer_shards(f"{name}/{OPTIMIZER}/{kind}/{layout.key}", layout, slot, value):
                stored.fill(shard.name, shard.box, shard.data)
    if trained.optimizer is not None:
        set_optimizer_values(trained.optimizer, stored.content["models"][name]["optimizer"])


def _restore_random(stored: StoredCheckpoint, rank: int) -> None:
    source = rank % stored.content["ranks"]
    prefix = f"{RANDOM}/{source}/"
    tensors = {name.removeprefix(prefix): stored.whole(name) for name in stored.manifest if name.startswith(prefix)}
    _random_state.restore(tensors, stored.content["random"][source])
