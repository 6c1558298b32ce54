import numpy as np
import pytest

from vime_proto.errors import ContractError
from vime_r3.capture import from_vllm
from vime_r3.trace import decode, extend

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


def spans_of(trace):
    return [(span.rows.start, span.rows.stop, span.version.number) for span in trace.header.spans]


def test_chunked_prefill_and_decoding_are_parts_one_after_the_other(capture, engine_array):
    array = engine_array(9)
    parts = [array[0:4], None, array[4:6], array[6:6], array[6:7], array[7:9]]
    assert capture(parts, 6, 4) == capture(array, 6, 4)
    with pytest.raises(ContractError, match=r"rows \[0, 10\)"):
        capture([array[0:4], array[3:9]], 6, 4)  # a row twice at the border of two parts


def test_a_preempted_request_whose_rows_were_lost_has_holes_there_alone(capture, engine_array):
    """The engine computed tokens 0-3 before, and 4-8 after; what it dropped in between it never gave back."""
    array = engine_array(9)
    dropped = array.copy()
    dropped[:4] = 0
    routes = decode(capture(dropped, 6, 4), rows=9)
    assert routes.valid.tolist() == [False] * 4 + [True] * 5
    np.testing.assert_array_equal(routes.ids[4:], array[4:, 3:])
    # Computed again in whole, the rows are those of one pass.
    assert decode(capture(array, 6, 4)).valid.all()


def test_padded_rows_of_a_batch_never_become_routes(capture, engine_array):
    array = engine_array(9).astype(np.int16)
    array[8] = -1
    with pytest.raises(ContractError, match=r"row 8, layer 3: \[-1, -1\] are not in"):
        capture(array, 6, 4)


def test_a_request_kept_across_updates_has_spans_of_versions(capture, engine_array, version):
    """Tokens 0-1 under 1, 2-4 under 2, 5 under 3; each update is met by reading the last token before it."""
    array = engine_array(11)
    trace = capture(array, 6, 6, version=[(0, version(1)), (2, version(2)), (5, version(3))])
    assert spans_of(trace) == [(0, 7, 1), (7, 10, 2), (10, 11, 3)]
    assert decode(trace).exact.tolist() == [True] * 7 + [False] * 4
    part = capture(array, 6, 6, version=[(0, version(1)), (2, version(2)), (5, version(3))], start_row=8)
    assert spans_of(part) == [(0, 2, 2), (2, 3, 3)]
    assert not decode(part).exact.any()
    late = capture(array, 6, 6, version=[(0, version(1)), (2, version(2))], start_row=11)
    assert not spans_of(late) and late.header.rows == 0


def test_versions_must_begin_at_the_first_token_and_end_within_the_answer(capture, engine_array, version):
    for wrong in ([(1, version(1))], [(0, version(1)), (0, version(2))], []):
        with pytest.raises(ContractError, match="version: first tokens must ascend from 0"):
            capture(engine_array(9), 6, 4, version=wrong)
    with pytest.raises(ContractError, match="token 4 is not among 4 generated tokens"):
        capture(engine_array(9), 6, 4, version=[(0, version(1)), (4, version(2))])


def test_a_continued_sample_asks_for_the_rows_it_lacks_only(capture, engine_array, version):
    """A partial sample of 6 + 4 tokens goes on for 3 more under the same weights: rows 9 to 11 are new."""
    array = engine_array(12)
    before = capture(array[:9], 6, 4)
    addition = capture(array[9:], 10, 3, start_row=9, first_row=9)
    whole = extend(before, addition, start_row=9)
    assert decode(whole, rows=12).exact.all()
    np.testing.assert_array_equal(decode(whole).ids, array[:, 3:])


def test_a_sample_continued_by_newer_weights_takes_all_rows_of_the_new_request(capture, engine_array, version):
    old, new = engine_array(9), engine_array(12, seed=5)
    whole = extend(capture(old, 6, 4), capture(new, 10, 3, version=version(2)))
    routes = decode(whole, rows=12)
    np.testing.assert_array_equal(routes.ids, new[:, 3:])
    assert routes.exact.tolist() == [False] * 9 + [True] * 3


def test_three_turns_of_which_the_second_has_no_trace(capture, engine_array):
    """Tool tokens lie between turns: the next request reads them as its prompt. The last turn's rows cover everything."""
    first = capture(engine_array(7), 5, 3)
    second = capture(None, 11, 2)
    third_array = engine_array(17, seed=9)
    third = capture(third_array[12:], 15, 3, start_row=12, first_row=12)
    joined = extend(extend(first, second), third, start_row=12)
    routes = decode(joined, rows=17)
    assert routes.valid.tolist() == [True] * 7 + [False] * 5 + [True] * 5
    np.testing.assert_array_equal(routes.ids[12:], third_array[12:, 3:])
