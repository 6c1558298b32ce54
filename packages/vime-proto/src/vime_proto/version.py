"""Policy versions and lineages: which weights a token came from, and whether they still count."""

from __future__ import annotations

from collections.abc import Iterable

from vime_proto.common.v1 import common_pb2 as pb
from vime_proto.errors import ContractError


def policy_version(run_id: str, lineage: int, number: int) -> pb.PolicyVersion:
    """A version with every field present."""
    return pb.PolicyVersion(run_id=run_id, lineage=lineage, number=number)


def check_version(version: pb.PolicyVersion, field: str = "version") -> None:
    """Checks that every field is present.

    Raises:
        ContractError: an empty run id, or an absent lineage or number (0 is a value).
    """
    if not version.run_id:
        raise ContractError(f"{field}.run_id", "must not be empty")
    for name in ("lineage", "number"):
        if not version.HasField(name):
            raise ContractError(f"{field}.{name}", "must be set; 0 is a value")


def show(version: pb.PolicyVersion) -> str:
    """``run/0:12`` for number 12 of lineage 0."""
    return f"{version.run_id}/{version.lineage}:{version.number}"


def parse(text: str) -> pb.PolicyVersion:
    """The inverse of ``show``.

    Raises:
        ContractError: another form.
    """
    run_id, slash, rest = text.rpartition("/")
    lineage, colon, number = rest.partition(":")
    if not (slash and colon and run_id and lineage.isdigit() and number.isdigit()):
        raise ContractError("version", f"{text!r} is not of the form run_id/lineage:number")
    return policy_version(run_id, int(lineage), int(number))


def satisfies(have: pb.PolicyVersion, need: pb.PolicyVersion) -> bool:
    """Whether weights ``have`` are at least ``need``: the same run and lineage, and no smaller number."""
    return have.run_id == need.run_id and have.lineage == need.lineage and have.number >= need.number


class LineageTree:
    """The lineages of one run, and which of their versions are alive.

    A version is alive when it lies on the path from the present lineage back to the first: of every ancestor the numbers
    up to the fork count, later ones are dead.
    """

    def __init__(self, lineages: Iterable[pb.Lineage] = ()):
        self._lineages: dict[int, pb.Lineage] = {}
        for lineage in lineages:
            self.add(lineage)

    @property
    def current(self) -> int | None:
        """Ordinal of the present lineage; None before the first."""
        return max(self._lineages, default=None)

    def get(self, ordinal: int) -> pb.Lineage | None:
        """The lineage with this ordinal, if it is known."""
        return self._lineages.get(ordinal)

    def add(self, lineage: pb.Lineage) -> None:
        """Adds the next lineage; adding the same again changes nothing.

        Raises:
            ContractError: a missing field, an ordinal that is not the next one, an unknown parent, or another content under
                a known ordinal.
        """
        if not lineage.HasField("ordinal"):
            raise ContractError("lineage.ordinal", "must be set; 0 is the first lineage")
        known = self._lineages.get(lineage.ordinal)
        if known is not None:
            if known != lineage:
                raise ContractError("lineage", f"lineage {lineage.ordinal} exists with another parent or fork")
            return
        first = not self._lineages
        if lineage.HasField("parent") != lineage.HasField("forked_at"):
            raise ContractError("lineage.forked_at", "parent and forked_at must be set together")
        if first and lineage.HasField("parent"):
            # A store may begin in the middle of a run's history: earlier lineages are unknown to it, hence dead.
            self._lineages[lineage.ordinal] = _copy(lineage)
            return
        if not first:
            if lineage.ordinal <= max(self._lineages):
                raise ContractError("lineage.ordinal", f"must be above {max(self._lineages)}, got {lineage.ordinal}")
            if not lineage.HasField("parent"):
                raise ContractError(
                    "lineage.parent", f"lineage {lineage.ordinal} is not the first and must state its parent"
                )
            if lineage.parent not in self._lineages:
                known_ordinals = ", ".join(map(str, sorted(self._lineages)))
                raise ContractError("lineage.parent", f"unknown lineage {lineage.parent}; known: {known_ordinals}")
        self._lineages[lineage.ordinal] = _copy(lineage)

    def is_alive(self, version: pb.PolicyVersion) -> bool:
        """Whether weights of this version are part of the history of the present lineage."""
        ordinal, limit = self.current, None
        while ordinal is not None:
            if version.lineage == ordinal:
                return limit is None or version.number <= limit
            lineage = self._lineages.get(ordinal)
            if lineage is None or not lineage.HasField("parent"):
                return False
            limit = lineage.forked_at if limit is None else min(limit, lineage.forked_at)
            ordinal = lineage.parent
        return False

    def __iter__(self):
        return iter(self._lineages[ordinal] for ordinal in sorted(self._lineages))


def _copy(lineage: pb.Lineage) -> pb.Lineage:
    copy = pb.Lineage()
    copy.CopyFrom(lineage)
    return copy
