import numpy as np
import pytest

from vime_proto.errors import ContractError
from vime_r3.agreement import compare


def test_order_does_not_matter_and_flips_are_counted_by_layer():
    live = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    replayed = np.array([[[1, 0], [2, 3]], [[0, 2], [2, 4]], [[6, 7], [6, 7]]])
    found = compare(live, replayed, layer_ids=(3, 5))
    assert found.flips.tolist() == [2, 1]
    assert (found.tokens, found.rows, found.tokens_with_flip, found.experts_changed) == (3, 6, 2, 4)
    np.testing.assert_allclose(found.layer_agreement, [1 / 3, 2 / 3])
    assert found.flip_share == pytest.approx(0.5) and found.token_share == pytest.approx(2 / 3)


def test_holes_are_left_out():
    live, replayed = np.zeros((3, 1, 1), int), np.ones((3, 1, 1), int)
    found = compare(live, replayed, layer_ids=(0,), valid=np.array([False, True, False]))
    assert (found.tokens, found.flips.tolist()) == (1, [1])
    nothing = compare(live, replayed, layer_ids=(0,), valid=np.zeros(3, bool))
    assert nothing.flip_share == nothing.token_share == 0.0 and nothing.layer_agreement.tolist() == [1.0]


def test_shapes_must_agree():
    with pytest.raises(ContractError, match="replayed"):
        compare(np.zeros((3, 1, 1)), np.zeros((2, 1, 1)), layer_ids=(0,))
