"""The pure decisions, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_buffer._rules import (
    LeaseClock,
    Limits,
    Occupancy,
    after_failed_attempt,
    alive,
    capacity,
    check_limits,
    is_too_old,
    minimum_number,
    oldest_number,
    pack_versions,
    unpack_versions,
)
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError
from vime_proto.version import LineageTree

LIMITS = st.builds(
    Limits, batch_groups=st.integers(1, 64), max_staleness=st.integers(0, 8), publish_interval=st.just(1)
)


@pytest.mark.parametrize(
    "staleness, trained, version, under_way, expected",
    [
        (0, 0, None, 0, 0),
        (0, 0, 0, 0, 4),
        (0, 0, 0, 3, 1),
        (0, 1, 0, 0, 0),
        (0, 1, 1, 0, 4),
        (1, 0, 0, 0, 8),
        (1, 1, 0, 4, 0),
        (1, 1, 1, 4, 4),
        (3, 9, 7, 2, 6),
        (0, 5, 5, 40, 0),
    ],
)
def test_capacity(staleness, trained, version, under_way, expected):
    assert capacity(Limits(4, staleness), trained, version, Occupancy(leased=under_way)) == expected


@given(LIMITS, st.integers(0, 50), st.integers(0, 8), st.integers(0, 400))
def test_what_the_gate_lets_through_is_young_enough_when_it_is_trained(limits, trained, lag, under_way):
    """A group answered by the version published at its grant is within the bound, first in, first out."""
    version = max(0, trained - lag)
    if capacity(limits, trained, version, Occupancy(ready=under_way)) > 0:
        batch = trained + under_way // limits.batch_groups
        assert not is_too_old(version, batch, limits.max_staleness)
        assert 0 <= minimum_number(limits, trained, under_way) <= version


@given(LIMITS, st.integers(0, 50), st.integers(0, 400))
def test_the_lowest_version_asked_for_is_the_oldest_that_may_be_trained(limits, trained, under_way):
    number = minimum_number(limits, trained, under_way)
    batch = trained + under_way // limits.batch_groups
    assert not is_too_old(number, batch, limits.max_staleness)
    assert number == 0 or is_too_old(number - 1, batch, limits.max_staleness)


@pytest.mark.parametrize(
    "interval, staleness, ok", [(1, 0, True), (2, 0, False), (2, 1, True), (5, 4, True), (5, 3, False)]
)
def test_the_effective_lag_of_rare_publications_is_checked(interval, staleness, ok):
    limits = Limits(1, staleness, interval)
    if ok:
        check_limits(limits)
    else:
        with pytest.raises(ContractError, match=f"at least {interval - 1}, got {staleness}"):
            check_limits(limits)


def test_age_is_that_of_the_oldest_version():
    assert oldest_number([(0, 3), (0, 5), (0, 7)]) == 3
    assert 8 - oldest_number([(0, 3), (0, 5), (0, 7)]) == 5
    assert oldest_number([]) is None and not is_too_old(None, 9, 0)


def test_versions_live_up_to_the_fork():
    lineage = common_pb2.Lineage
    tree = LineageTree([lineage(ordinal=0), lineage(ordinal=1, parent=0, forked_at=3)])
    assert alive([(0, 3), (1, 9)], tree) and not alive([(0, 3), (0, 4)], tree)
    tree.add(lineage(ordinal=2, parent=0, forked_at=2))
    assert alive([(0, 2), (2, 3)], tree) and not alive([(0, 3)], tree) and not alive([(1, 3)], tree)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**9))))
def test_versions_round_trip(versions):
    assert unpack_versions(pack_versions(versions)) == tuple(versions)


def test_the_last_attempt_drops():
    assert [after_failed_attempt(n, 3) for n in range(3)] == [(1, False), (2, False), (3, True)]
    assert after_failed_attempt(0, 1) == (1, True)


def test_the_lease_clock_ignores_jumps_of_the_wall_clock():
    wall, monotonic = [1000.0], [5.0]
    clock = LeaseClock(lambda: wall[0], lambda: monotonic[0])
    wall[0] -= 500
    monotonic[0] += 10
    assert clock() == 1010.0
