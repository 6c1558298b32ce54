"""Random weights that depend on the seed and each tensor's name, not on the order or the layout of parameters."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["random_tensor"]


def random_tensor(name: str, shape: tuple[int, ...], std: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Ones for norm weights, zeros for biases, else normal with mean 0 and standard deviation `std` from float32."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.randn(shape, generator=generator) * std).to(dtype)
