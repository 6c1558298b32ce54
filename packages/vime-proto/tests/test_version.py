"""Versions and lineages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.common.v1 import common_pb2 as pb
from vime_proto.errors import ContractError
from vime_proto.version import LineageTree, check_version, parse, policy_version, satisfies, show


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(0, 2**63), st.integers(0, 2**63))
def test_shown_versions_are_read_back(run_id, lineage, number):
    version = policy_version(run_id, lineage, number)
    assert parse(show(version)) == version


@pytest.mark.parametrize("text", ["", "run", "run/1", "run/a:1", "/0:1", "run/1:", "run/:1"])
def test_other_texts_are_refused(text):
    with pytest.raises(ContractError, match="run_id/lineage:number"):
        parse(text)


def test_zero_is_a_version_and_differs_from_unset():
    zero = pb.PolicyVersion.FromString(policy_version("run", 0, 0).SerializeToString())
    check_version(zero)
    assert zero.HasField("number") and zero.HasField("lineage")
    for name in ("number", "lineage", "run_id"):
        half = policy_version("run", 0, 0)
        half.ClearField(name)
        with pytest.raises(ContractError, match=name):
            check_version(half)


@pytest.mark.parametrize(
    ("have", "need", "fits"),
    [
        (("r", 0, 3), ("r", 0, 3), True),
        (("r", 0, 4), ("r", 0, 3), True),
        (("r", 0, 2), ("r", 0, 3), False),
        (("r", 1, 9), ("r", 0, 3), False),
        (("s", 0, 9), ("r", 0, 3), False),
    ],
)
def test_a_version_satisfies_its_lineage_upwards(have, need, fits):
    assert satisfies(policy_version(*have), policy_version(*need)) is fits


@st.composite
def histories(draw):
    """Lineages as restores make them: each forks from an earlier one at some number."""
    lineages = [pb.Lineage(ordinal=0)]
    for ordinal in range(1, draw(st.integers(0, 6)) + 1):
        parent = draw(st.integers(0, ordinal - 1))
        lineages.append(pb.Lineage(ordinal=ordinal, parent=parent, forked_at=draw(st.integers(0, 20))))
    return lineages


def _alive_by_walking(lineages, ordinal, number):
    """Whether the path from the newest lineage back to the start passes through the version."""
    at, limit = lineages[-1], None
    while True:
        if at.ordinal == ordinal:
            return limit is None or number <= limit
        if not at.HasField("parent"):
            return False
        limit = at.forked_at if limit is None else min(limit, at.forked_at)
        at = next(one for one in lineages if one.ordinal == at.parent)


@given(histories(), st.integers(0, 8), st.integers(0, 25))
def test_versions_above_a_fork_are_dead(lineages, ordinal, number):
    tree = LineageTree(lineages)
    assert tree.current == lineages[-1].ordinal
    known = any(one.ordinal == ordinal for one in lineages)
    expected = known and _alive_by_walking(lineages, ordinal, number)
    assert tree.is_alive(policy_version("r", ordinal, number)) == expected


@given(histories())
def test_adding_a_known_lineage_changes_nothing(lineages):
    tree = LineageTree(lineages)
    for lineage in lineages:
        tree.add(lineage)
    assert list(tree) == lineages


@pytest.mark.parametrize(
    ("lineage", "field"),
    [
        (pb.Lineage(), "ordinal"),
        (pb.Lineage(ordinal=1), "parent"),
        (pb.Lineage(ordinal=1, parent=0), "forked_at"),
        (pb.Lineage(ordinal=1, parent=7, forked_at=0), "parent"),
        (pb.Lineage(ordinal=0, parent=0, forked_at=0), "lineage"),
    ],
)
def test_lineages_that_do_not_follow_are_refused(lineage, field):
    tree = LineageTree([pb.Lineage(ordinal=0)])
    with pytest.raises(ContractError, match=field):
        tree.add(lineage)
    assert list(tree) == [pb.Lineage(ordinal=0)]


def test_a_dead_grandparent_stays_dead():
    # 0 forks at 5 into 1, 1 forks at 3 into 2: of lineage 0 only numbers up to 3 live on.
    tree = LineageTree(
        [
            pb.Lineage(ordinal=0),
            pb.Lineage(ordinal=1, parent=0, forked_at=5),
            pb.Lineage(ordinal=2, parent=1, forked_at=3),
        ]
    )
    assert [tree.is_alive(policy_version("r", 0, n)) for n in (3, 4, 5, 6)] == [True, False, False, False]
