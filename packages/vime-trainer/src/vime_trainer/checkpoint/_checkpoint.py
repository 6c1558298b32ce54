"""Saving and restoring a run of one process as one atomic unit: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import mmap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vime_proto.checksum import checksum
from vime_trainer.checkpoint import _random_state
from vime_trainer.checkpoint._folders import STATE, CheckpointError, find_latest, path_of, prune
from vime_trainer.checkpoint._settings import CheckpointSettings
from vime_trainer.checkpoint._state import RunState
from vime_trainer.files import new_directory
from vime_trainer.optim import Optimizer
from vime_trainer.policy import Policy

__all__ = ["load_checkpoint", "save_checkpoint", "start_point"]

_FORMAT = 1


def save_checkpoint(
    root: str | Path, policy: Policy, optimizer: Optimizer, state: RunState, keep: int | None = None
) -> Path:
    """Writes one checkpoint; it is visible only when complete and on disk.

    Args:
        root: folder of all checkpoints of the run; made when missing.
        policy, optimizer: what is trained.
        state: where the run stands.
        keep: removes all but the newest so many afterwards; None removes nothing.

    Returns:
        The checkpoint's folder.
    """
    path = path_of(root, state.step)
    random_tensors, random_values = _random_state.capture()
    files = {
        "model.safetensors": {name: param.detach() for name, param in policy.parameters().items()},
        "optimizer.safetensors": optimizer.state_tensors(),
        "random.safetensors": random_tensors,
    }
    with new_directory(path) as made:
        for name, tensors in files.items():
            save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, made / name)
        content = {
            "format": _FORMAT,
            "files": {name: _digest(made / name) for name in files},
            "state": asdict(state),
            "optimizer": {"updates": optimizer.updates, "skipped": optimizer.skipped},
            "random": random_values,
        }
        (made / STATE).write_text(json.dumps(content) + "\n", encoding="utf-8")
    if keep is not None:
        prune(root, keep)
    return path


def load_checkpoint(path: str | Path, policy: Policy, optimizer: Optimizer | None = None) -> RunState:
    """Restores what `save_checkpoint` wrote, bit by bit. Without an optimizer only the weights are restored.

    Raises:
        CheckpointError: no such checkpoint, a damaged file, or another model.
    """
    path = Path(path)
    content = _read_state(path)
    _fill(policy, _read(path, content, "model.safetensors"), path)
    if optimizer is not None:
        try:
            optimizer.load_state_tensors(_read(path, content, "optimizer.safetensors"))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        optimizer.updates = content["optimizer"]["updates"]
        optimizer.skipped = content["optimizer"]["skipped"]
        _random_state.restore(_read(path, content, "random.safetensors"), content["random"])
    return RunState(**content["state"])


def start_point(root: str | Path, settings: CheckpointSettings, target: int | None) -> Path | None:
    """The checkpoint that a run starts from; None starts anew.

    Args:
        root: folder of the run's checkpoints; may be missing, empty, or hold what a killed process left.
        settings: the `[checkpoint]` table.
        target: steps after which the run ends; None has no end.

    Raises:
        CheckpointError: resume = "must" without a checkpoint, "never" with one, or one that is not below the target.
    """
    latest = find_latest(root)
    if latest is None:
        if settings.resume == "must":
            raise CheckpointError(f"checkpoint.resume: must, but {root} holds no complete checkpoint")
        return None
    if settings.resume == "never":
        raise CheckpointError(f"checkpoint.resume: never, but {root} holds {latest.name}; choose another output folder")
    step = int(latest.name.removeprefix("step-"))
    if target is not None and step >= target:
        raise CheckpointError(
            f"{latest} has trained {step} steps already, and the run ends after {target}: nothing is left to do"
        )
    return latest


def _read_state(path: Path) -> dict[str, Any]:
    file = path / STATE
    if not file.is_file():
        raise CheckpointError(f"{path}: no checkpoint (no {STATE})")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"{file}: format {content.get('format')!r}; this version reads {_FORMAT}")
    return content


def _read(path: Path, content: dict[str, Any], name: str) -> dict[str, Tensor]:
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"{path}: {name} is missing")
    if _digest(file) != content["files"][name]:
        raise CheckpointError(f"{file}: damaged: its checksum is not the one in {STATE}")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error


def _digest(file: Path) -> str:
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return checksum(memoryview(data)).value.hex()


def _fill(policy: Policy, tensors: dict[str, Tensor], path: Path) -> None:
    params = policy.parameters()
    differing = sorted(set(params) ^ set(tensors))
    if differing:
        raise CheckpointError(f"{path}: another model: {differing[0]!r} is in only one of the two")
    for name, param in params.items():
        value = tensors[name]
        if value.shape != param.shape or value.dtype != param.dtype:
            have, need = f"{value.dtype} {list(value.shape)}", f"{param.dtype} {list(param.shape)}"
            raise CheckpointError(f"{path}: another model: {name} is {have}, the model needs {need}")
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(tensors[name])
