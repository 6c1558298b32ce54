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
    if algorithm == pb.CHECKSUM_ALGORITHM_XXH3_64:
        return pb.Checksum(algorithm=algorithm, value=xxhash.xxh3_64_digest(data))
    if algorithm == pb.CHECKSUM_ALGORITHM_SHA256:
        return pb.Checksum(algorithm=algorithm, value=hashlib.sha256(data).digest())
    raise ContractError("checksum.algorithm", f"not computed here: {algorithm}; valid: XXH3_64, SHA256")


def verify(data: Bytes, expected: pb.Checksum, what: str) -> None:
    """Checks ``data`` against its checksum.

    Raises:
        ContractError: they differ; names ``what``.
    """
    actual = checksum(data, expected.algorithm)
    if actual.value != expected.value:
        raise ContractError("checksum", f"{what}: expected {expected.value.hex()}, got {actual.value.hex()}")
