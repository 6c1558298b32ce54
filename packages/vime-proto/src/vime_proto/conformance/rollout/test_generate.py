"""Generation: deltas, ends, refusals, repetition."""

from __future__ import annotations

import math
import threading

import grpc
import numpy as np
import pytest

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import INVALID, PRECONDITION, new_id, refused
from vime_proto.fakes import build
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.version import check_version, policy_version


def test_the_model_is_described(engine):
    info = engine.info
    assert info.vocab_size > 1 and info.max_model_len > 8
    assert info.model_digest and info.dtype
    check_version(info.version)
    assert bool(info.experts) == bool(info.top_k_experts) == bool(info.moe_layer_ids)


def test_an_answer_is_the_concatenation_of_its_messages(engine):
    answer = engine.generate(max_new_tokens=5, ignore_eos=True)
    assert len(answer.tokens) == 5
    assert answer.last.finish_reason == sample_pb2.FINISH_REASON_LENGTH
    assert all(0 <= token < engine.info.vocab_size for token in answer.tokens)
    assert all(message.engine_id for message in answer.messages)
    assert all(message.version == engine.info.version for message in answer.messages)


def test_one_token_is_an_answer(engine):
    assert len(engine.generate(max_new_tokens=1, ignore_eos=True).tokens) == 1


def test_a_prompt_of_one_token_is_enough(engine):
    assert len(engine.generate(prompt=engine.prompt(1), max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_greedy_sampling_repeats_itself(engine):
    first, second = (engine.generate(temperature=0.0, max_new_tokens=8, ignore_eos=True) for _ in range(2))
    assert first.tokens == second.tokens


def test_a_seed_repeats_itself(engine):
    runs = [engine.generate(seed=7, max_new_tokens=8, ignore_eos=True).tokens for _ in range(2)]
    assert runs[0] == runs[1]


def test_many_at_once_do_not_mix(engine):
    requests = [
        engine.request(prompt=engine.prompt(3 + i % 3, i), temperature=0.0, max_new_tokens=6) for i in range(12)
    ]
    answers: dict[int, list[int]] = {}

    def one(index: int) -> None:
        answers[index] = engine.generate(requests[index]).tokens

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 5, 11):
        again = pb.GenerateRequest()
        again.CopyFrom(requests[index])
        again.request_id = new_id()
        assert engine.generate(again).tokens == answers[index]


def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine):
    free = engine.generate(temperature=0.0, max_new_tokens=6, ignore_eos=True).tokens
    stop = free[-1]
    answer = engine.generate(temperature=0.0, max_new_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    assert answer.tokens == free[: free.index(stop) + 1]
    assert answer.last.finish_reason == sample_pb2.FINISH_REASON_STOP
    assert answer.last.HasField("stop_token_id") and answer.last.stop_token_id == stop
    assert answer.last.HasField("stop_included") and answer.last.stop_included


def test_a_repeated_id_replays_the_same_answer(engine):
    request = engine.request(max_new_tokens=8, ignore_eos=True)
    first, second = engine.generate(request), engine.generate(request)
    assert second.tokens == first.tokens
    np.testing.assert_array_equal(second.logprobs, first.logprobs)
    assert second.last.finish_reason == first.last.finish_reason


def test_a_repeated_id_with_another_payload_is_refused(engine):
    request = engine.request()
    engine.generate(request)
    other = engine.request(prompt=engine.prompt(4, 3), request_id=request.request_id)
    with refused(INVALID, names=request.request_id):
        list(engine.start(other))


def _change(**sampling):
    def change(request):
        for name, value in sampling.items():
            setattr(request.sampling, name, value)

    return change


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda r: r.ClearField("request_id"), "request_id"),
        (lambda r: r.ClearField("prompt_token_ids"), "prompt_token_ids"),
        (lambda r: r.prompt_token_ids.CopyFrom(build.ids([])), "prompt_token_ids"),
        (lambda r: r.prompt_token_ids.CopyFrom(build.ids([-1])), "prompt_token_ids"),
        (lambda r: r.prompt_token_ids.CopyFrom(to_tensor(np.array([1, 2], np.int64))), "prompt_token_ids.dtype"),
        (lambda r: r.ClearField("sampling"), "sampling"),
        (lambda r: r.sampling.ClearField("max_new_tokens"), "max_new_tokens"),
        (_change(max_new_tokens=0), "max_new_tokens"),
        (_change(temperature=-1.0), "temperature"),
        (_change(temperature=math.nan), "temperature"),
        (_change(top_p=0.0), "top_p"),
        (_change(top_p=1.5), "top_p"),
        (_change(min_p=-0.1), "min_p"),
    ],
)
def test_a_bad_request_is_refused_by_field(engine, spoil, field):
    request = engine.request()
    spoil(request)
    with refused(INVALID, field=field):
        list(engine.start(request))


def test_ids_beyond_the_vocabulary_are_refused(engine):
    with refused(INVALID, field="prompt_token_ids"):
        list(engine.start(engine.request(prompt=[engine.info.vocab_size])))


def test_a_prompt_without_room_is_refused(engine):
    with refused(INVALID, field="prompt_token_ids"):
        list(engine.start(engine.request(prompt=[engine.prompt(1)[0]] * engine.info.max_model_len)))


def test_alternatives_come_most_likely_first(engine):
    request = engine.request(max_new_tokens=3, ignore_eos=True, top_logprobs=2)
    answer = engine.or_skip("top_logprobs", lambda: engine.generate(request))
    for message in answer.messages:
        if not message.HasField("token_ids"):
            continue
        values = to_numpy(message.top_logprobs.logprobs, shape=(message.token_ids.shape[0], 2))
        assert (values[:, 0] >= values[:, 1]).all()
        assert (values[:, 0] >= to_numpy(message.logprobs) - 1e-4).all()


def test_a_truncated_distribution_brings_its_kept_set(engine):
    request = engine.request(max_new_tokens=4, ignore_eos=True, top_k=3)
    answer = engine.or_skip("kept sets of truncated sampling", lambda: engine.generate(request))
    for message in answer.messages:
        if not message.HasField("token_ids"):
            continue
        if not message.HasField("kept_token_ids"):
            pytest.skip("the target returns no kept sets")
        values = to_numpy(message.kept_token_ids.values)
        offsets = to_numpy(message.kept_token_ids.offsets)
        for row, token in enumerate(to_numpy(message.token_ids)):
            kept = values[int(offsets[row]) : int(offsets[row + 1])]
            assert token in kept and len(kept) <= 3


def test_the_version_held_satisfies_itself(engine):
    engine.generate(engine.request(minimum_version=engine.info.version))


def test_a_version_to_come_is_waited_for_or_refused(engine):
    held = engine.info.version
    later = policy_version(held.run_id, held.lineage, held.number + 1000)
    with refused(PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED):
        list(engine.stub.Generate(engine.request(minimum_version=later), timeout=1.0))


def test_a_version_without_number_is_refused(engine):
    half = common.PolicyVersion(run_id="x", lineage=0)
    with refused(INVALID, field="minimum_version.number"):
        list(engine.start(engine.request(minimum_version=half)))
