import numpy as np
import pytest

from vime_proto.errors import ContractError
from vime_r3.capture import from_vllm
from vime_r3.trace import decode

LAYERS = (3, 4, 5, 6)  # three dense layers come first


@pytest.fixture
def capture(version):
    def capture(array, prompt, generated, **more):
        given = {"moe_layer_ids": LAYERS, "experts": 8, "top_k": 2, "version": version(1)} | more
        return from_vllm(array, prompt_tokens=prompt, generated_tokens=generated, **given)

    return capture


@pytest.fixture
def engine_array(make_ids):
    """All seven layers; the dense ones are zeros."""

    def make(rows, seed=0, dtype=np.uint8):
        return np.concatenate([np.zeros((rows, 3, 2), dtype), make_ids(rows, seed=seed, dtype=dtype)], axis=1)

    return make


def test_dense_layers_are_dropped_by_global_number(capture, engine_array):
    array = engine_array(9)
    routes = decode(capture(array, 6, 4), rows=9)
    assert routes.layer_ids == LAYERS
    np.testing.assert_array_equal(routes.ids, array[:, 3:])


@pytest.mark.parametrize(("prompt", "generated"), [(1, 1), (1, 5), (6, 1), (6, 5), (6, 0), (1, 0)])
def test_one_array_and_two_parts_give_the_same_rows(capture, engine_array, prompt, generated):
    rows = prompt + generated - 1
    array = engine_array(rows)
    whole = capture(array, prompt, generated)
    assert decode(whole, rows=rows).valid.all()
    split = min(prompt, rows)
    parts = (array[:split], array[split:] if split < rows else None)
    assert capture(parts, prompt, generated) == whole
    assert capture((None, array), prompt, generated) == whole


def test_rows_that_were_not_captured_are_holes(capture, engine_array):
    array = engine_array(5)
    assert decode(capture(array, 6, 4), rows=9).valid.tolist() == [True] * 5 + [False] * 4
    after_cache_hit = decode(capture(array, 6, 4, first_row=4), rows=9)
    assert after_cache_hit.valid.tolist() == [False] * 4 + [True] * 5
    np.testing.assert_array_equal(after_cache_hit.ids[4:], array[:, 3:])
    assert not decode(capture(None, 6, 0), rows=5).valid.any()


def test_a_row_of_zeros_is_a_hole_and_never_expert_0(capture, engine_array):
    array = engine_array(9)
    array[2:4] = 0
    assert np.flatnonzero(~decode(capture(array, 6, 4)).valid).tolist() == [2, 3]


def test_only_wanted_rows_are_sent(capture, engine_array):
    array = engine_array(9)
    trace = capture(array, 6, 4, start_row=5)
    np.testing.assert_array_equal(decode(trace, rows=4).ids, array[5:, 3:])
    assert decode(capture(array, 6, 4, start_row=9), rows=0).ids.shape == (0, 4, 2)


def test_abort_after_five_tokens_has_rows_of_exactly_those_tokens(capture, engine_array):
    assert capture(engine_array(10), 6, 5).header.rows == 10
    with pytest.raises(ContractError, match=r"rows \[0, 11\) for 6 prompt \+ 5 generated tokens"):
        capture(engine_array(11), 6, 5)


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (lambda a: a[:, :6], {}, "moe_layer_ids: 6 is no layer of an array of 6 layers"),
        (lambda a: a, {"moe_layer_ids": (2, 3)}, r"layers \[2\] hold only zeros"),
        (lambda a: a, {"top_k": 3}, "has 2 experts a token, the model has 3"),
        (lambda a: a * 0, {}, "routes were not captured"),
        (lambda a: a.astype(np.float32), {}, r"must be integers \[rows, layers, top_k\]"),
        (lambda a: a.astype(np.int32) + 256, {}, r"not in \[0, 8\)"),
        (lambda a: a, {"start_row": 10}, r"start_row: must be in \[0, 9\]"),
        (lambda a: a, {"moe_layer_ids": ()}, "layer_ids: must be ascending"),
        (lambda a: a, {"first_row": 1}, r"rows \[1, 10\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(capture, engine_array, make, more, message):
    with pytest.raises(ContractError, match=message):
        capture(make(engine_array(9)), 6, 4, **more)


def test_parts_of_different_models_are_refused(capture, engine_array):
    with pytest.raises(ContractError, match=r"routed_experts\[1\]"):
        capture((engine_array(3), engine_array(3)[:, :5]), 3, 4)
