"""Routes of a step as one array, and back, as they travel between vLLM's processes."""

import types

import numpy as np
import pytest

from vime_rollout.engine.backend import _frames

NAMES = ["a", "b", "c", "d"]


def routes(*rows, dtype=np.uint8):
    rng = np.random.default_rng(0)
    return [None if n is None else rng.integers(0, np.iinfo(dtype).max, (n, 3, 2)).astype(dtype) for n in rows]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (1, None, 5, 0), (None, 7, None, 2)])
def test_every_request_gets_its_own_rows_back(rows, dtype):
    given = routes(*rows, dtype=dtype)
    frame = _frames.join(NAMES, given)
    # As it comes out of a message: read-only, at any address.
    frame = np.frombuffer(b"x" + frame.tobytes(), np.uint8, offset=1)
    assert _frames.is_frame(frame)
    for before, after in zip(given, _frames.split(NAMES, frame), strict=True):
        assert (before is None) == (after is None)
        if before is not None:
            assert after.dtype == before.dtype and np.array_equal(after, before) and not np.shares_memory(after, frame)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 0, 2, 1), (2, 2, 2, 2), (0, 0, 3, 0)])
def test_rows_are_taken_as_they_would_be_joined(counts):
    (ids,) = routes(9)
    ends = [7, 3, 9, 5]
    parts = [ids[end - count : end] if count else None for end, count in zip(ends, counts, strict=True)]
    assert np.array_equal(_frames.take(NAMES, ids, ends, counts), _frames.join(NAMES, parts))
    assert _frames.take(NAMES, ids, ends, [0] * 4) is None


@pytest.mark.parametrize("instead", [{0: 3}, {1: 0, 3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}, {2: 0}])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (0, 1, 0, 0), (0, 0, 0, 0)])
def test_some_requests_have_rows_of_their_own(counts, instead):
    (ids,), ends = routes(9), [7, 3, 9, 5]
    own = {place: routes(rows + 1)[0][1:] for place, rows in instead.items()}
    parts = [ids[end - count : end] if count else None for end, count in zip(ends, counts, strict=True)]
    for place, rows in own.items():
        parts[place] = rows
    assert np.array_equal(_frames.take(NAMES, ids, ends, counts, own), _frames.join(NAMES, parts))


def test_without_routes_there_is_no_frame():
    assert _frames.join(NAMES, routes(None, None, None, None)) is None
    assert not _frames.is_frame(None) and not any(map(_frames.is_frame, routes(1, 2)))


@pytest.mark.parametrize("names", [["a", "c", "b", "d"], ["a", "b", "c"], []])
def test_routes_of_other_requests_are_refused(names):
    with pytest.raises(RuntimeError, match="in another order"):
        _frames.split(names, _frames.join(NAMES, routes(1, 1, 1, 1)))


def values(*rows, candidates=2):
    rng = np.random.default_rng(0)
    return [
        None
        if n is None
        else (rng.integers(0, 9, (n, candidates)), rng.standard_normal((n, candidates)), rng.integers(0, 9, n), None)
        for n in rows
    ]


@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (1, None, 5, 0), (None, 7, None, 2)])
def test_every_request_gets_its_own_log_probs_back(rows):
    given = values(*rows)
    for before, after in zip(given, _frames.split_logprobs(NAMES, _frames.join_logprobs(NAMES, given)), strict=True):
        assert (before is None) == (after is None)
        assert before is None or all(np.array_equal(one, other) for one, other in zip(before[:3], after, strict=True))


def test_log_probs_of_other_requests_are_refused():
    assert _frames.join_logprobs(NAMES, values(None, None, None, None)) is None
    joined = _frames.join_logprobs(NAMES, values(1, 1, 1, 1))
    for names in (["a", "c", "b", "d"], ["a", "b", "c"]):
        with pytest.raises(RuntimeError, match="log-probs are of 4 requests in another order"):
            _frames.split_logprobs(names, joined)


def test_what_is_no_frame_is_refused():
    with pytest.raises(RuntimeError, match="did not come as they were sent"):
        _frames.split(NAMES, np.zeros(64, np.uint8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_vllms_front_end_sees_what_the_scheduler_packed():
    from vllm import envs

    from vime_rollout.engine.backend import _packing, _scheduler

    assert _scheduler.is_known()
    size = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
    given = routes(*[1] * (size + 3))
    outputs = [
        types.SimpleNamespace(request_id=str(n), routed_experts=one, new_logprobs=None) for n, one in enumerate(given)
    ]
    _packing.pack(outputs)
    assert [n for n, one in enumerate(outputs) if one.routed_experts is not None] == [0, size]
    seen = []
    processor = types.SimpleNamespace(process_outputs=lambda some, stamp: seen.extend(some))
    _packing.take_apart(processor)
    for start in (0, size):
        processor.process_outputs(outputs[start : start + size], 1.0)
    assert len(seen) == len(given)
    assert all(np.array_equal(one.routed_experts, before) for one, before in zip(seen, given, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_an_answer_from_outside_the_step_has_no_rows():
    from vime_rollout.engine.backend import _packing

    (ids,) = routes(3)
    empty = {"routed_experts": None, "new_logprobs": None}
    outputs = [
        types.SimpleNamespace(request_id=one, new_token_ids=new, **empty) for one, new in (("failed", []), ("a", [7]))
    ]
    _packing.pack(outputs, _packing.Rows(ids, {"b": 0, "a": 2}))
    none, rows = _frames.split(["failed", "a"], outputs[0].routed_experts)
    assert none is None and np.array_equal(rows, ids[2:])
