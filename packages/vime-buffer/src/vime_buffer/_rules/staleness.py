"""Age and life of versions. A number counts acked batches, so ages compare across lineages of one history."""

from __future__ import annotations

from collections.abc import Iterable

from vime_proto.common.v1 import common_pb2
from vime_proto.version import LineageTree, policy_version

Versions = tuple[tuple[int, int], ...]


def oldest_number(versions: Iterable[tuple[int, int]]) -> int | None:
    """Smallest number among (lineage, number) pairs: a sample is as old as its oldest token. None when there is none."""
    return min((number for _, number in versions), default=None)


def is_too_old(number: int | None, trained_at: int, max_staleness: int) -> bool:
    """Whether tokens of version ``number`` may not train the batch with ordinal ``trained_at``."""
    return number is not None and trained_at - number > max_staleness


def alive(versions: Iterable[tuple[int, int]], tree: LineageTree) -> bool:
    """Whether every version lies on the history of the present lineage."""
    return all(tree.is_alive(policy_version("run", lineage, number)) for lineage, number in versions)


def version_pair(version: common_pb2.PolicyVersion) -> tuple[int, int]:
    """(lineage, number)."""
    return version.lineage, version.number


def pack_versions(versions: Iterable[tuple[int, int]]) -> str:
    """``"0:3,1:5"``, as stored in a row."""
    return ",".join(f"{lineage}:{number}" for lineage, number in versions)


def unpack_versions(text: str) -> Versions:
    """The inverse of ``pack_versions``."""
    pairs = (one.split(":") for one in text.split(",") if one)
    return tuple((int(lineage), int(number)) for lineage, number in pairs)
