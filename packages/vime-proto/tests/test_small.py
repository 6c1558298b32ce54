"""Checksums and call metadata."""

import hashlib

import pytest

from vime_proto import metadata
from vime_proto.checksum import checksum, verify
from vime_proto.common.v1 import common_pb2 as pb
from vime_proto.errors import ContractError


def test_known_checksums():
    # The first is the XXH3 specification's value for empty input and seed 0.
    assert checksum(b"").value.hex() == "2d06800538d394c2"
    assert checksum(b"abc", pb.CHECKSUM_ALGORITHM_SHA256).value == hashlib.sha256(b"abc").digest()


def test_any_buffer_is_taken():
    assert checksum(memoryview(b"abc")) == checksum(bytearray(b"abc")) == checksum(b"abc")


def test_a_difference_names_what_differs():
    verify(b"abc", checksum(b"abc"), "chunk 3")
    with pytest.raises(ContractError, match="chunk 3"):
        verify(b"abd", checksum(b"abc"), "chunk 3")


def test_an_algorithm_that_is_not_computed_is_refused():
    for algorithm in (pb.CHECKSUM_ALGORITHM_UNSPECIFIED, pb.CHECKSUM_ALGORITHM_CRC32C):
        with pytest.raises(ContractError, match="valid: XXH3_64, SHA256"):
            checksum(b"", algorithm)


def test_metadata_keys_are_lower_case_and_different():
    keys = [getattr(metadata, name) for name in metadata.__all__]
    assert len(set(keys)) == len(keys)
    assert all(key == key.lower() and not key.startswith("grpc-") and not key.endswith("-bin") for key in keys)
