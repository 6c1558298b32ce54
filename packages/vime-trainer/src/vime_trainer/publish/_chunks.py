"""Cutting a stream of named tensors into chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from vime_proto.common.v1 import common_pb2 as common

_LAYER = re.compile(r"^(.*\.layers\.\d+)\.")
_EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.")

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


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order, on the host, without a copy where there need not be one.

    Raises:
        ValueError: an element type that the contract has not.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"element type {tensor.dtype} cannot be sent; valid: {', '.join(map(str, DTYPES))}")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
