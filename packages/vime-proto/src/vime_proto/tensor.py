"""Numpy arrays to ``vime.common.v1.Tensor`` and back, without a Python loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from vime_proto.common.v1 import common_pb2 as pb
from vime_proto.errors import ContractError

# bfloat16 and float8 have no numpy type: their bits travel as unsigned integers of the same size.
_NUMPY: dict[int, np.dtype] = {
    pb.DTYPE_BOOL: np.dtype(np.bool_),
    pb.DTYPE_UINT8: np.dtype("<u1"),
    pb.DTYPE_UINT16: np.dtype("<u2"),
    pb.DTYPE_UINT32: np.dtype("<u4"),
    pb.DTYPE_UINT64: np.dtype("<u8"),
    pb.DTYPE_INT8: np.dtype("<i1"),
    pb.DTYPE_INT16: np.dtype("<i2"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT16: np.dtype("<f2"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
    pb.DTYPE_FLOAT8_E4M3: np.dtype("<u1"),
    pb.DTYPE_FLOAT8_E5M2: np.dtype("<u1"),
}
_BITS_ONLY = {pb.DTYPE_BFLOAT16, pb.DTYPE_FLOAT8_E4M3, pb.DTYPE_FLOAT8_E5M2}
_ENUM = {dtype: enum for enum, dtype in _NUMPY.items() if enum not in _BITS_ONLY}


def numpy_dtype(dtype: int, field: str = "dtype") -> np.dtype:
    """The numpy type that holds elements of a ``Dtype`` (bits, for bfloat16 and float8).

    Raises:
        ContractError: unknown or unspecified dtype.
    """
    try:
        return _NUMPY[dtype]
    except KeyError:
        raise ContractError(field, f"unknown dtype {dtype}; valid: {', '.join(map(pb.Dtype.Name, _NUMPY))}") from None


def itemsize(dtype: int, field: str = "dtype") -> int:
    """Bytes of one element of a ``Dtype``."""
    return numpy_dtype(dtype, field).itemsize


def to_tensor(array: np.ndarray, dtype: int | None = None) -> pb.Tensor:
    """Encodes an array of any shape.

    Args:
        array: any numpy array; it is made contiguous and little-endian if it is not.
        dtype: the ``Dtype`` to state. Needed only where numpy has no such type: bfloat16 and float8, given as bits.

    Raises:
        ContractError: numpy type without a ``Dtype``, or a stated dtype of another element size.
    """
    array = np.asarray(array)
    native = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    if native.byteorder == "=" and sys.byteorder == "big":
        native = native.newbyteorder("<")
    data = np.ascontiguousarray(array, dtype=native)
    if dtype is None:
        dtype = _ENUM.get(np.dtype(native.str.replace("=", "<")))
        if dtype is None:
            raise ContractError("dtype", f"numpy type {array.dtype} has no Dtype; valid: {', '.join(map(str, _ENUM))}")
    elif numpy_dtype(dtype) != native:
        raise ContractError("dtype", f"{pb.Dtype.Name(dtype)} needs numpy type {_NUMPY[dtype]}, got {array.dtype}")
    return pb.Tensor(dtype=dtype, shape=array.shape, data=data.tobytes())


def to_numpy(
    tensor: pb.Tensor,
    field: str = "tensor",
    dtype: int | None = None,
    shape: Sequence[int | None] | None = None,
) -> np.ndarray:
    """Decodes without a copy: the array is a read-only view of the message's bytes.

    Args:
        tensor: the message.
        field: how errors name it.
        dtype: the only ``Dtype`` that is right; None takes any.
        shape: the expected shape; None stands for any length of a dimension.

    Raises:
        ContractError: wrong dtype or shape, or bytes that do not fit them.
    """
    kind = numpy_dtype(tensor.dtype, f"{field}.dtype")
    if dtype is not None and tensor.dtype != dtype:
        raise ContractError(f"{field}.dtype", f"must be {pb.Dtype.Name(dtype)}, got {pb.Dtype.Name(tensor.dtype)}")
    dims = tuple(tensor.shape)
    if shape is not None and (
        len(dims) != len(shape) or any(want is not None and want != got for want, got in zip(shape, dims, strict=True))
    ):
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
        raise ContractError(f"{field}.shape", f"must be {wanted}, got {list(dims)}")
    if math.prod(dims) * kind.itemsize != len(tensor.data):
        raise ContractError(
            f"{field}.data",
            f"shape {list(dims)} of {kind} needs {math.prod(dims) * kind.itemsize} bytes, got {len(tensor.data)}",
        )
    return np.frombuffer(tensor.data, dtype=kind).reshape(dims)
