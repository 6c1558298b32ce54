"""The tensor codec: any array, bit by bit, without a copy."""

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.common.v1 import common_pb2 as pb
from vime_proto.errors import ContractError
from vime_proto.tensor import itemsize, numpy_dtype, to_numpy, to_tensor

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda d: npst.arrays(np.dtype(d), npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@given(arrays)
def test_any_array_survives_the_wire(array):
    message = pb.Tensor.FromString(to_tensor(array).SerializeToString())
    back = to_numpy(message)
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes(), "NaN payloads and signed zeros included"


@given(arrays.filter(lambda a: a.ndim >= 2))
def test_layout_in_memory_does_not_matter(array):
    turned = array.T
    np.testing.assert_array_equal(to_numpy(to_tensor(turned)), turned)
    np.testing.assert_array_equal(to_numpy(to_tensor(array[::-1])), array[::-1])


def test_big_endian_arrays_travel_little_endian():
    message = to_tensor(np.array([1, 256], ">i4"))
    assert message.data == b"\x01\0\0\0\0\x01\0\0" and message.dtype == pb.DTYPE_INT32


def test_decoding_copies_nothing_and_is_read_only():
    message = to_tensor(np.arange(5))
    view = to_numpy(message)
    assert not view.flags.writeable and not view.flags.owndata


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(pb.DTYPE_BFLOAT16, np.uint16), (pb.DTYPE_FLOAT8_E4M3, np.uint8), (pb.DTYPE_FLOAT8_E5M2, np.uint8)],
)
def test_types_without_numpy_counterpart_travel_as_bits(dtype, bits):
    array = np.array([0, 1, 127], bits)
    message = to_tensor(array, dtype)
    assert message.dtype == dtype
    np.testing.assert_array_equal(to_numpy(message, dtype=dtype), array)


def test_a_stated_dtype_of_another_size_is_refused():
    with pytest.raises(ContractError, match="DTYPE_BFLOAT16"):
        to_tensor(np.zeros(2, np.float32), pb.DTYPE_BFLOAT16)


def test_types_that_the_contract_has_not_are_refused():
    with pytest.raises(ContractError, match="complex"):
        to_tensor(np.zeros(2, np.complex64))
    with pytest.raises(ContractError, match="valid"):
        numpy_dtype(99)
    with pytest.raises(ContractError):
        to_numpy(pb.Tensor())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dtype": pb.DTYPE_INT64}, "x.dtype"),
        ({"shape": (3,)}, "x.shape"),
        ({"shape": (None, None)}, "x.shape"),
        ({"shape": ()}, "x.shape"),
    ],
)
def test_what_does_not_fit_is_named(options, names):
    with pytest.raises(ContractError) as caught:
        to_numpy(to_tensor(np.zeros(2, np.int32)), "x", **options)
    assert caught.value.violations[0][0] == names


@pytest.mark.parametrize("change", [b"\0", b"\0" * 9])
def test_bytes_that_do_not_fit_the_shape_are_refused(change):
    message = to_tensor(np.zeros(2, np.int32))
    message.data = change
    with pytest.raises(ContractError, match=r"needs 8 bytes, got"):
        to_numpy(message)


def test_huge_shapes_do_not_overflow():
    with pytest.raises(ContractError):
        to_numpy(pb.Tensor(dtype=pb.DTYPE_UINT8, shape=[2**33, 2**33], data=b""))


def test_sizes():
    assert [itemsize(d) for d in (pb.DTYPE_BOOL, pb.DTYPE_BFLOAT16, pb.DTYPE_FLOAT8_E4M3, pb.DTYPE_FLOAT64)] == [
        1,
        2,
        1,
        8,
    ]


def test_expert_ids_around_the_byte_limit_survive_and_state_their_type():
    ids = np.array([0, 255, 256, 511])
    message = to_tensor(ids.astype(np.uint16))
    assert message.dtype == pb.DTYPE_UINT16
    np.testing.assert_array_equal(to_numpy(message), ids)
