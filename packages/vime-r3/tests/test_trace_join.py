import numpy as np
import pytest

from vime_proto.errors import ContractError
from vime_proto.version import policy_version
from vime_r3.trace import concatenate, decode, encode, extend, pad, truncate


@pytest.fixture
def make_trace(version):
    def make(ids, number=1, lineage=0, **more):
        return encode(ids, layer_ids=range(4), experts=8, version=version(number, lineage), chunk_rows=4, **more)

    return make


def pairs(messages):
    return [(message.start, message.stop) for message in messages]


def test_concatenate_joins_rows_holes_and_spans(make_ids, make_trace):
    first, second = make_ids(6, seed=1), make_ids(5, seed=2)
    joined = concatenate([make_trace(first, valid=np.arange(6) < 5), make_trace(second, 2, valid=np.arange(5) > 0)])
    routes = decode(joined, rows=11)
    np.testing.assert_array_equal(routes.ids[:5], first[:5])
    np.testing.assert_array_equal(routes.ids[7:], second[1:])
    assert pairs(joined.header.holes) == [(5, 7)]
    assert [(s.rows.start, s.rows.stop, s.version.number) for s in joined.header.spans] == [(0, 5, 1), (7, 11, 2)]


def test_concatenate_refuses_another_model(make_ids, make_trace, version):
    other = encode(make_ids(3), layer_ids=[0, 1, 2, 4], experts=8, version=version(1))
    with pytest.raises(ContractError, match=r"traces\[1\].header.layer_ids"):
        concatenate([make_trace(make_ids(3)), other])
    with pytest.raises(ContractError, match="must not be empty"):
        concatenate([])


def test_padding_adds_holes_at_the_end(make_ids, make_trace):
    padded = pad(make_trace(make_ids(3)), 7)
    assert decode(padded, rows=7).valid.tolist() == [True] * 3 + [False] * 4
    with pytest.raises(ContractError, match="more than 2: truncate it"):
        pad(padded, 2)
    assert truncate(padded, 3).header.holes == make_trace(make_ids(3)).header.holes


def test_next_turn_under_the_same_version_appends_and_the_first_rows_win(make_ids, make_trace):
    first, second = make_ids(6, seed=1), make_ids(10, seed=2)
    whole = decode(extend(make_trace(first), make_trace(second)), rows=10)
    np.testing.assert_array_equal(whole.ids[:6], first)
    np.testing.assert_array_equal(whole.ids[6:], second[6:])
    assert whole.exact.all()


def test_next_turn_that_returns_only_new_rows(make_ids, make_trace):
    first, second = make_ids(6, seed=1), make_ids(4, seed=2)
    whole = decode(extend(make_trace(first), make_trace(second), start_row=6), rows=10)
    np.testing.assert_array_equal(whole.ids, np.concatenate([first, second]))


def test_holes_are_filled_by_a_later_request_of_the_same_version(make_ids, make_trace):
    first, second = make_ids(6, seed=1), make_ids(8, seed=2)
    whole = decode(extend(make_trace(first, valid=np.arange(6) != 2), make_trace(second)), rows=8)
    np.testing.assert_array_equal(whole.ids[2], second[2])
    np.testing.assert_array_equal(whole.ids[3:6], first[3:6])
    assert whole.valid.all()


def test_a_turn_without_routes_leaves_a_hole_and_later_turns_go_on(make_ids, make_trace):
    first, third = make_ids(4, seed=1), make_ids(3, seed=3)
    blank = make_trace(make_ids(3), valid=np.zeros(3, dtype=bool))
    whole = extend(extend(make_trace(first), blank, start_row=4), make_trace(third, 1), start_row=7)
    routes = decode(whole, rows=10)
    assert pairs(whole.header.holes) == [(4, 7)]
    np.testing.assert_array_equal(routes.ids[7:], third)
    skipped = extend(make_trace(first), make_trace(third), start_row=7)
    assert pairs(skipped.header.holes) == [(4, 7)]


def test_a_newer_version_replaces_all_rows_and_marks_the_old_ones(make_ids, make_trace):
    first, second = make_ids(6, seed=1), make_ids(10, seed=2)
    trace = extend(make_trace(first, 3), make_trace(second, 4))
    routes = decode(trace, rows=10)
    np.testing.assert_array_equal(routes.ids, second)
    assert pairs(trace.header.inexact) == [(0, 6)]
    assert routes.exact.tolist() == [False] * 6 + [True] * 4
    assert {span.version.number for span in trace.header.spans} == {4}


def test_a_newer_version_that_skips_rows_is_itself_marked(make_ids, make_trace):
    first, second = make_ids(6, seed=1), make_ids(4, seed=2)
    trace = extend(make_trace(first, 3), make_trace(second, 4), start_row=5)
    routes = decode(trace, rows=9)
    np.testing.assert_array_equal(routes.ids, np.concatenate([first[:5], second]))
    assert pairs(trace.header.inexact) == [(5, 9)]


def test_weights_that_changed_within_a_request_make_its_first_rows_old(make_ids, make_trace):
    """Rows 0 to 2 are of version 3, 3 to 5 of version 4; the next request of version 4 has recomputed all of them."""
    first, second = make_ids(6, seed=1), make_ids(10, seed=2)
    mixed = concatenate([make_trace(first[:3], 3), make_trace(first[3:], 4)])
    trace = extend(mixed, make_trace(second, 4))
    np.testing.assert_array_equal(decode(trace, rows=10).ids, second)
    assert pairs(trace.header.inexact) == [(0, 6)]
    later = extend(mixed, make_trace(second[6:], 4), start_row=6)
    np.testing.assert_array_equal(decode(later, rows=10).ids, np.concatenate([first, second[6:]]))
    assert pairs(later.header.inexact) == [(6, 10)]
    with pytest.raises(ContractError, match="run/0:3 is older than run/0:4"):
        extend(concatenate([make_trace(first[:3], 4), make_trace(first[3:], 3)]), make_trace(second, 3))


def test_a_restored_lineage_is_newer_whatever_its_number(make_ids, make_trace):
    trace = extend(make_trace(make_ids(6), 9, lineage=0), make_trace(make_ids(8), 4, lineage=1))
    assert pairs(trace.header.inexact) == [(0, 6)]


def test_an_older_version_or_another_run_is_refused(make_ids, make_trace):
    with pytest.raises(ContractError, match="run/0:3 is older than run/0:4"):
        extend(make_trace(make_ids(6), 4), make_trace(make_ids(8), 3))
    other = encode(make_ids(8), layer_ids=range(4), experts=8, version=policy_version("other", 0, 9))
    with pytest.raises(ContractError, match="another run"):
        extend(make_trace(make_ids(6)), other)
