"""The state of every random number generator, as tensors and JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture", "restore"]


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of torch (CPU and this process's GPU), numpy's global generator and Python's `random`."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    values = {
        "numpy": [kind, int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    return tensors, values


def restore(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Sets what `capture` gave; a GPU's state is skipped on a host without one."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    kind, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))
