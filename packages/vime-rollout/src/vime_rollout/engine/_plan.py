"""Where the tensors of an update lie in its chunks, worked out once from the manifest."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError, nearest
from vime_proto.tensor import itemsize, numpy_dtype
from vime_proto.validate import dtype_name
from vime_proto.weights.v1 import weights_pb2 as pb
from vime_rollout.engine._model import update_groups

_TORCH = {common.DTYPE_FLOAT8_E4M3: "float8_e4m3fn", common.DTYPE_FLOAT8_E5M2: "float8_e5m2"}
# Bits of the exponent, for types that numpy does not know: all ones is infinity or NaN.
_EXPONENT = {common.DTYPE_BFLOAT16: 0x7F80, common.DTYPE_FLOAT16: 0x7C00}
_CACHED = 1 << 17  # numbers of two bytes


class Fill(NamedTuple):
    """Bytes of a chunk that belong to a piece of a tensor.

    Attributes:
        name, dtype, shape: of the tensor; ``dtype`` as torch names it.
        start, extent: the box of the piece; empty when the piece is the whole tensor.
        piece_bytes: bytes of the piece.
        piece_offset: where these bytes lie in the piece.
        offset, length: where they lie in the chunk.
    """

    name: str
    dtype: str
    shape: list[int]
    start: list[int]
    extent: list[int]
    piece_bytes: int
    piece_offset: int
    offset: int
    length: int


def plan(manifest: pb.WeightManifest) -> dict[str, list[list[Fill]]]:
    """Fills by source id and chunk index.

    Raises:
        ContractError: a chunk that ends within an element.
    """
    pieces: dict[str, list[tuple[int, int, pb.TensorSpec, pb.TensorPiece]]] = {
        one.source_id: [] for one in manifest.sources
    }
    for spec in manifest.tensors:
        for piece in spec.pieces:
            low = piece.bytes.offset
            pieces[piece.source_id].append((low, low + piece.bytes.length, spec, piece))
    for one in pieces.values():
        one.sort(key=lambda entry: entry[:2])
    return {source.source_id: _source(source, pieces[source.source_id]) for source in manifest.sources}


def _source(source: pb.WeightSource, pieces: list) -> list[list[Fill]]:
    ends = [stop for _, stop, _, _ in pieces]
    chunks = []
    for chunk in source.chunks:
        first, last = chunk.bytes.offset, chunk.bytes.offset + chunk.bytes.length
        fills = []
        for low, high, spec, piece in pieces[bisect.bisect_right(ends, first) :]:
            if low >= last:
                break
            begin, end = max(low, first), min(high, last)
            size = itemsize(spec.dtype)
            if (begin - low) % size or (end - low) % size:
                raise ContractError(
                    "manifest.sources.chunks",
                    f"source {source.source_id!r}, chunk {chunk.index} ends within an element of {spec.name!r}",
                )
            fills.append(
                Fill(
                    spec.name,
                    _TORCH.get(spec.dtype) or dtype_name(spec.dtype),
                    list(spec.shape),
                    list(piece.start),
                    list(piece.shape),
                    high - low,
                    begin - low,
                    begin - first,
                    end - begin,
                )  # fmt: skip
            )
        chunks.append(fills)
    return chunks


def check_groups(manifest: pb.WeightManifest, expected: Mapping[str, object]) -> None:
    """A delta must hold all tensors of a fused module or none.

    Raises:
        ContractError: names a tensor that is lacking.
    """
    given = {spec.name for spec in manifest.tensors}
    groups = update_groups(list(expected))
    touched = {groups[name] for name in given}
    lacking = [name for name in expected if groups[name] in touched and name not in given]
    if lacking:
        module = groups[lacking[0]]
        raise ContractError(
            "manifest.tensors",
            f"lacks {lacking[0]!r}: the engine fuses it with others of {module!r}, so an update holds all tensors of it or none",
        )


def check_names(manifest: pb.WeightManifest, expected: Mapping[str, object]) -> None:
    """Refuses tensors that the model does not have, with the nearest name that it has.

    Raises:
        ContractError: names the tensor.
    """
    for index, spec in enumerate(manifest.tensors):
        if spec.name not in expected:
            near = nearest(spec.name, expected, "tensor").partition("valid:")[0].strip()
            raise ContractError(f"manifest.tensors[{index}].name", near.rstrip(";"))


def check_finite(data: memoryview, fills: Sequence[Fill], dtypes: Mapping[str, int]) -> None:
    """Checks that no weight is NaN or infinite.

    Raises:
        ValueError: names the first tensor that holds one.
    """
    for fill in fills:
        dtype = dtypes[fill.name]
        part = data[fill.offset : fill.offset + fill.length]
        if dtype in (common.DTYPE_FLOAT32, common.DTYPE_FLOAT64):
            values = np.frombuffer(part, dtype=numpy_dtype(dtype))
            # min and max both propagate NaN, and need no array as large as the tensor.
            finite = not len(values) or bool(np.isfinite(values.min()) and np.isfinite(values.max()))
        elif dtype in _EXPONENT:
            mask = np.uint16(_EXPONENT[dtype])
            bits = np.frombuffer(part, dtype=np.uint16)
            # In pieces that stay in a core's cache; a whole tensor at once takes five times as long.
            pieces = (bits[at : at + _CACHED] for at in range(0, len(bits), _CACHED))
            finite = all((piece & mask).max() < mask for piece in pieces)
        else:
            continue
        if not finite:
            raise ValueError(f"tensor {fill.name!r} holds NaN or infinite values")
