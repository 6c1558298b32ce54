"""Writes safetensors files tensor by tensor (https://huggingface.co/docs/safetensors#format): nothing is held but one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TensorSpec", "plan_files", "write_files"]

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


class TensorSpec(NamedTuple):
    """Element type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_files(specs: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    """Deals tensors, in order, to files of at most `limit` bytes; a larger tensor has a file of its own."""
    files: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if files[-1] and size + spec.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = spec
        size += spec.nbytes
    return files


def write_files(paths: Iterable[tuple[Path, dict[str, TensorSpec]]], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes each file in turn, taking its tensors from one stream.

    Raises:
        ValueError: the stream does not bring the planned tensors in the planned order; names the first.
    """
    stream = iter(tensors)
    for path, specs in paths:
        _write(path, specs, stream)
    if (extra := next(stream, None)) is not None:
        raise ValueError(f"tensor {extra[0]!r} was not planned")


def _write(path: Path, specs: dict[str, TensorSpec], stream: Iterator[tuple[str, Tensor]]) -> None:
    header, offsets = _header(specs)
    with path.open("wb") as file:
        file.write(header)
        for name, spec in specs.items():
            found, tensor = next(stream, (None, None))
            if tensor is None or found != name or (tensor.dtype, tuple(tensor.shape)) != spec:
                given = "nothing" if tensor is None else f"{found!r}: {tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"tensor {name!r}: {spec.dtype} {spec.shape} was planned, the model brings {given}")
            file.seek(len(header) + offsets[name])
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            # Not to be held while the stream makes the next one.
            del tensor


def _header(specs: dict[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The file's head, and where each tensor begins after it.

    Readers map the file and need every tensor aligned to its element type, so the wider types come first.
    """
    offsets: dict[str, int] = {}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in sorted(specs.items(), key=lambda one: -one[1].dtype.itemsize):
        offsets[name], end = end, end + spec.nbytes
        entries[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets
