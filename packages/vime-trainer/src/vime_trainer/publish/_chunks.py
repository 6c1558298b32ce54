"""Cutting a stream of named tensors into chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from vime_proto.common.v1 import common_pb2 as common

_LAYER = re.compile(r"^(.*\.layers\.\d+)\.")
_EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.")

# Larger chunks (all experts of a layer) come without pinned memory, which would stay taken.
_MOST_PINNED = 1 << 30

Named = tuple[str, torch.Tensor]

DTYPES = {
    torch.float32: common.DTYPE_FLOAT32,
    torch.float64: common.DTYPE_FLOAT64,
    torch.float16: common.DTYPE_FLOAT16,
    torch.bfloat16: common.DTYPE_BFLOAT16,
    torch.float8_e4m3fn: common.DTYPE_FLOAT8_E4M3,
    torch.float8_e5m2: common.DTYPE_FLOAT8_E5M2,
    torch.uint8: common.DTYPE_UINT8,
    torch.int8: common.DTYPE_INT8,
    torch.int32: common.DTYPE_INT32,
    torch.int64: common.DTYPE_INT64,
    torch.bool: common.DTYPE_BOOL,
}


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def host_bytes(chunk: list[Named]) -> memoryview:
    """The elements of all tensors, each in row-major order, one tensor after the other, on the host.

    A copy, but for a single tensor that lies so already. From a GPU the bytes come through pinned memory, which torch keeps
    for the next chunks, at the speed of the bus and with one wait for the whole chunk.

    Raises:
        ValueError: an element type that the contract has not; names the tensor.
    """
    for name, tensor in chunk:
        if tensor.dtype not in DTYPES:
            valid = ", ".join(map(str, DTYPES))
            raise ValueError(f"weight {name!r}: element type {tensor.dtype} cannot be sent; valid: {valid}")
    tensors = [tensor.detach() for _, tensor in chunk]
    if len(tensors) == 1 and tensors[0].device.type == "cpu":
        return _flat(tensors[0]).numpy().data
    total = sum(map(nbytes, tensors))
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    pinned = bool(devices) and total <= _MOST_PINNED
    host = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    at = 0
    for tensor in tensors:
        host[at : at + nbytes(tensor)].copy_(_flat(tensor), non_blocking=True)
        at += nbytes(tensor)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return host.numpy().data


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def chunked(tensors: Iterable[Named], chunk_bytes: int) -> Iterator[list[Named]]:
    """Lists of tensors of at most `chunk_bytes`, in order.

    Engines repack a layer once it is complete, so a decoder layer stays in one chunk where it fits. Experts of a layer are
    never separated, and a tensor is never cut: these alone may make a chunk larger.
    """
    chunk: list[Named] = []
    size = 0
    for unit in _units(tensors, chunk_bytes):
        extra = sum(nbytes(tensor) for _, tensor in unit)
        if chunk and size + extra > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk += unit
        size += extra
    if chunk:
        yield chunk


def _units(tensors: Iterable[Named], chunk_bytes: int) -> Iterator[list[Named]]:
    for layer in _runs(tensors, _LAYER):
        if sum(nbytes(tensor) for _, tensor in layer) <= chunk_bytes:
            yield layer
        else:
            # A layer larger than a chunk: its experts come together, wherever they stood in it.
            experts: dict[str, list[Named]] = {}
            for name, tensor in layer:
                found = _EXPERTS.match(name)
                experts.setdefault(found.group(1) if found else name, []).append((name, tensor))
            yield from experts.values()


def _runs(tensors: Iterable[Named], pattern: re.Pattern[str]) -> Iterator[list[Named]]:
    """Neighbours with the same match of `pattern`; a name without a match stands alone."""
    run: list[Named] = []
    key: str | None = None
    for name, tensor in tensors:
        found = pattern.match(name)
        here = found.group(1) if found else None
        if run and (here is None or here != key):
            yield run
            run = []
        run.append((name, tensor))
        key = here
    if run:
        yield run
