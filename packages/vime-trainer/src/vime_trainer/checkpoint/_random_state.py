"""The state of every random number generator of a process, as tensors and JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture", "restore"]

_TRACKER = "megatron-"


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of torch (CPU, this process's GPU and Megatron's own), numpy's global generator and Python's `random`."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in _tracker().get_states().items():
        tensors[f"{_TRACKER}{name}"] = state
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    tensors["python"] = torch.tensor(internal, dtype=torch.int64)
    values = {
        "numpy": [kind, int(position), int(has_gauss), float(gauss)],
        "python": [version, gauss_next],
    }
    return tensors, values


def restore(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Sets what `capture` gave; a GPU's states are skipped on a host without one."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
        named = {name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)}
        if named:
            _tracker().set_states(named)
    kind, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, gauss_next = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
