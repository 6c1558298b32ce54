import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_proto.errors import ContractError
from vime_proto.version import policy_version
from vime_r3.layout import pack, take
from vime_r3.shards import join_layers, layer_range, layer_ranges, payload_bytes, row_ranges
from vime_r3.trace import Routes, decode, encode, select

V1 = policy_version("run", 0, 1)


def zigzag(total, rank, size):
    """Places of one context parallel rank: a part from the front and its mirror from the back; -1 beyond the tokens."""
    padded = -(-total // (2 * size)) * 2 * size
    parts = np.where(np.arange(padded) < total, np.arange(padded), -1).reshape(2 * size, -1)
    return np.concatenate([parts[rank], parts[2 * size - 1 - rank]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_ranks_get_all_rows_that_their_tokens_have_and_no_more(lengths, size, join):
    fetched = 0
    for rank in range(size):
        places = zigzag(sum(lengths), rank, size)
        found = row_ranges(places, lengths)
        fetched += sum(stop - start for ranges in found for start, stop in ranges)
        starts = np.cumsum([0, *lengths])
        inside = {
            starts[s] + row for s, ranges in enumerate(found) for start, stop in ranges for row in range(start, stop)
        }
        lasts = set((starts[1:] - 1).tolist())
        assert inside == {place for place in places.tolist() if place >= 0} - lasts
        wider = row_ranges(places, lengths, join=join)
        assert all(len(some) <= len(all_) for some, all_ in zip(wider, found, strict=True))
    assert fetched == sum(lengths) - len(lengths)


def test_a_sample_without_tokens_has_no_rows():
    assert row_ranges(np.arange(4), [0, 4]) == [[], [(0, 3)]]
    assert row_ranges(np.arange(4), [4, 0]) == [[(0, 3)], []]


def test_rows_outside_the_ranges_are_never_used(make_ids):
    lengths, size = [9, 4, 13], 2
    traces = [encode(make_ids(n - 1, seed=n), layer_ids=range(4), experts=8, version=V1) for n in lengths]
    whole = [decode(trace) for trace in traces]
    expected = pack(whole, lengths)
    for rank in range(size):
        places = zigzag(sum(lengths), rank, size)
        parts = []
        for routes, ranges in zip(whole, row_ranges(places, lengths), strict=True):
            mine = np.zeros(len(routes.ids), bool)
            for start, stop in ranges:
                mine[start:stop] = True
            ids = np.where(mine[:, None, None], routes.ids, 255)
            parts.append(Routes(ids, routes.valid & mine, routes.exact & mine, routes.layer_ids, routes.experts))
        got, want = take(*pack(parts, lengths), places), take(*expected, places)
        assert np.array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[0][got[1]], want[0][want[1]])


def test_bytes_of_a_shard(make_ids):
    ids = make_ids(20, layers=6)
    header = encode(ids, layer_ids=(3, 4, 5, 6, 7, 8), experts=8, version=V1, valid=np.arange(20) != 4).header
    assert payload_bytes(header, [(0, 20)], (0, 100)) == 19 * 6 * 2
    assert payload_bytes(header, [(2, 6), (10, 11)], (4, 6)) == 4 * 2 * 2
    assert payload_bytes(header, [(0, 20)], None) == 0
    assert layer_range((4, 5)) == (4, 6) and layer_range(()) is None


def test_layers_of_virtual_stages_come_in_parts_and_become_one_trace(make_ids):
    moe = (1, 2, 3, 5, 6, 8)
    assert layer_ranges((1, 2, 6, 8), moe) == [(1, 3), (6, 9)] and layer_ranges((3, 5), moe) == [(3, 6)]
    assert layer_ranges(moe, moe) == [(1, 9)] and layer_ranges((), moe) == []
    ids, valid = make_ids(20, layers=6), np.arange(20) % 7 != 3
    trace = encode(
        ids, layer_ids=moe, experts=8, version=V1, valid=valid, chunk_rows=6, chunk_layers=4, inexact=[(1, 3)]
    )
    mine = [0, 1, 4, 5]
    parts = [select(trace, layer_ids=layers) for layers in ((1, 2), (6, 8))]
    joined = decode(join_layers(parts), rows=20)
    whole = decode(trace)
    assert joined.layer_ids == (1, 2, 6, 8) and len(join_layers(parts).inline) == 20 * 4 * 2
    assert np.array_equal(joined.valid, valid) and np.array_equal(joined.exact, whole.exact)
    np.testing.assert_array_equal(joined.ids[valid], ids[valid][:, mine])
    assert join_layers(parts[:1]) == parts[0]


def test_parts_that_do_not_belong_together_are_refused(make_ids):
    with pytest.raises(ContractError, match=r"no layer 4 in the trace's \[1, 3\]"):
        layer_ranges((3, 4), (1, 3))
    one, other = (encode(make_ids(n, layers=2), layer_ids=(1, 2), experts=8, version=V1) for n in (5, 6))
    with pytest.raises(ContractError, match=r"parts\[1\]: rows, holes, experts or top-k differ"):
        join_layers([one, other])
    with pytest.raises(ContractError, match="layer_ids: must be ascending"):
        join_layers([one, one])


def test_places_beyond_the_tokens_are_refused():
    with pytest.raises(ContractError, match=r"must be -1 \(padding\) or in \[0, 5\)"):
        row_ranges(np.array([5]), [3, 2])
