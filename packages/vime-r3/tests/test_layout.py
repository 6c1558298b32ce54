import numpy as np
import pytest

from vime_proto.errors import ContractError
from vime_r3.layout import pack, take
from vime_r3.trace import decode, encode


@pytest.fixture
def make_routes(make_ids, version):
    def make(rows, **more):
        return decode(encode(make_ids(rows, seed=rows), layer_ids=range(4), experts=8, version=version(1), **more))

    return make


def test_packed_samples_keep_their_rows_and_last_tokens_route_themselves(make_routes):
    first, third = make_routes(3), make_routes(4, valid=np.array([True, False, True, True]))
    ids, valid = pack([first, None, third], [4, 2, 5], total=13)
    assert ids.shape == (13, 4, 2) and ids.dtype == np.uint8
    assert valid.tolist() == [True] * 3 + [False] + [False] * 2 + [True, False, True, True, False] + [False] * 2
    np.testing.assert_array_equal(ids[:3], first.ids)
    np.testing.assert_array_equal(ids[6:10], third.ids)


def test_packing_refuses_what_does_not_fit(make_routes):
    with pytest.raises(ContractError, match=r"routes\[0\]: has 3 rows for 5 tokens"):
        pack([make_routes(3)], [5])
    with pytest.raises(ContractError, match="do not fit into 3"):
        pack([make_routes(3)], [4], total=3)
    with pytest.raises(ContractError, match="at least one sample"):
        pack([None], [4])


def test_rows_follow_tokens_into_uneven_context_and_sequence_shards(make_routes):
    """7 tokens over TP 2 x CP 2: padded to 8, halves of context parallel ranks, then sequence shards."""
    ids, valid = pack([make_routes(6)], [7])
    places = np.concatenate([np.arange(7), [-1]])
    chunks = places.reshape(4, 2)
    shards = [part for a, b in ((0, 3), (1, 2)) for part in np.split(np.concatenate([chunks[a], chunks[b]]), 2)]
    seen = []
    for shard in shards:
        part, mask = take(ids, valid, shard)
        np.testing.assert_array_equal(part[mask], ids[shard[mask]])
        seen += shard[mask].tolist()
    assert sorted(seen) == list(range(6))
    with pytest.raises(ContractError, match=r"must be -1 \(padding\) or in \[0, 7\)"):
        take(ids, valid, np.array([7]))
