"""One safetensors file a rank, written tensor by tensor with its checksum, so that one tensor at a time is on the host.

Format: https://huggingface.co/docs/safetensors, header and data; readable by any safetensors library.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

__all__ = ["checksum_of", "write_tensors"]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK = 16 << 20


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, object]:
    """Writes a new file and flushes it to the disk.

    Returns:
        {"bytes": its size, "xxh3_64": its checksum in hexadecimal digits}.

    Raises:
        ValueError: a dtype that safetensors has no name for; names the tensor.
        FileExistsError: the file exists; nobody else may write it.
    """
    # Wide elements first, so that every tensor is aligned in a mapped file.
    tensors = sorted(tensors, key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for key, value in tensors:
        if value.dtype not in _NAMES:
            raise ValueError(f"{key}: dtype {value.dtype} has no name in safetensors")
        start, end = end, end + value.numel() * value.element_size()
        header[key] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = xxhash.xxh3_64(), 0
    with path.open("xb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            size += file.write(part)
            digest.update(part)
        for _, value in tensors:
            if value.numel():
                data = memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
                # In blocks, so that the training thread gets its turn.
                for start in range(0, len(data), _BLOCK):
                    size += file.write(data[start : start + _BLOCK])
                    digest.update(data[start : start + _BLOCK])
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_64": digest.hexdigest()}


def checksum_of(path: Path) -> str:
    """XXH3-64 of a file's contents, in hexadecimal digits."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with memoryview(data) as view:
            for start in range(0, len(view), _BLOCK):
                digest.update(view[start : start + _BLOCK])
    return digest.hexdigest()
