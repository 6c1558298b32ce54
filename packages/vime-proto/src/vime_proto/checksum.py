"""Checksums over bytes, as the contracts carry them."""

from __future__ import annotations

import hashlib

import xxhash

from vime_proto.common.v1 import common_pb2 as pb
from vime_proto.errors import ContractError

Bytes = bytes | bytearray | memoryview


def checksum(data: Bytes, algorithm: int = pb.CHECKSUM_ALGORITHM_XXH3_64) -> pb.Checksum:
    """Checksum of ``data`` (any contiguous buffer).

    Raises:
        ContractError: an algorithm that this implementation does not compute.
    """
    return pb.Checksum(algorithm=algorithm, value=digest(data, algorithm))


def verify(data: Bytes, expected: pb.Checksum, what: str) -> None:
    """Checks ``data`` against its checksum.

    Raises:
        ContractError: they differ; names ``what``.
    """
    actual, value = digest(data, expected.algorithm), expected.value
    if actual != value:
        raise ContractError("checksum", f"{what}: expected {value.hex()}, got {actual.hex()}")


def digest(data: Bytes, algorithm: int = pb.CHECKSUM_ALGORITHM_XXH3_64) -> bytes:
    """The value of a checksum alone.

    Raises:
        ContractError: as ``checksum``.
    """
    if algorithm == pb.CHECKSUM_ALGORITHM_XXH3_64:
        return xxhash.xxh3_64_digest(data)
    if algorithm == pb.CHECKSUM_ALGORITHM_SHA256:
        return hashlib.sha256(data).digest()
    raise ContractError("checksum.algorithm", f"not computed here: {algorithm}; valid: XXH3_64, SHA256")
