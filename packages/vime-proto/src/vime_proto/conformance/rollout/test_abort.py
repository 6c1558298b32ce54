"""Ending early: aborts keep what there is, cancelled calls leave nothing running."""

from __future__ import annotations

import time

import pytest

from vime_proto.conformance._calls import new_id
from vime_proto.conformance._rollout_client import Answer
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2


def _abort(engine, *ids: str) -> list[str]:
    return list(engine.stub.Abort(pb.AbortRequest(request_ids=ids), timeout=engine.timeout).aborted)


def _begun(engine, tokens: int = 3, **fields):
    """A long request, its open stream, and its first messages, `tokens` tokens or more."""
    request = engine.long_request(**fields)
    stream = engine.start(request)
    messages = []
    while len(Answer(messages).tokens) < tokens:
        messages.append(next(stream))
    return request, stream, messages


def test_an_aborted_request_answers_with_what_it_has(engine):
    began = time.monotonic()
    request, stream, messages = _begun(engine)
    before, seconds = len(Answer(messages).tokens), time.monotonic() - began
    aborted = _abort(engine, request.request_id)
    answer = Answer(messages + list(stream))
    answer.check(request)
    engine.ended_early(answer, seconds)
    assert aborted == [request.request_id]
    assert len(answer.tokens) >= before, "nothing that was streamed is taken back"
    assert answer.last.HasField("version"), "also the last message states its version"


def test_an_aborted_answer_is_replayed_as_it_ended(engine):
    request, stream, messages = _begun(engine)
    _abort(engine, request.request_id)
    first = Answer(messages + list(stream))
    again = engine.generate(request)
    assert again.tokens == first.tokens and again.last.finish_reason == first.last.finish_reason


def test_aborting_nothing_is_no_error(engine):
    assert _abort(engine, new_id("unknown")) == []


def test_aborting_all_ends_all(engine):
    began = time.monotonic()
    begun = [_begun(engine, 1) for _ in range(3)]
    seconds = time.monotonic() - began
    _abort(engine)
    for request, stream, messages in begun:
        answer = Answer(messages + list(stream))
        answer.check(request)
        engine.ended_early(answer, seconds)


def test_aborting_one_leaves_the_others(engine):
    first, second = _begun(engine, 1), _begun(engine, 1)
    _abort(engine, first[0].request_id)
    list(first[1])
    answer = Answer(second[2] + list(second[1]))
    answer.check(second[0])
    assert answer.last.finish_reason == sample_pb2.FINISH_REASON_LENGTH
    assert len(answer.tokens) == second[0].sampling.max_new_tokens


def test_after_an_abort_the_server_goes_on(engine):
    request, stream, _ = _begun(engine, 1)
    _abort(engine, request.request_id)
    list(stream)
    assert len(engine.generate(max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_a_cancelled_call_leaves_nothing_running(engine, target):
    if "vime.rollout.v1.EngineControlService" not in engine.services:
        pytest.skip("the target is no engine: it does not state how many requests run")
    control = rollout_pb2_grpc.EngineControlServiceStub(target.channel)
    if engine.long_seconds < 0.3:
        pytest.skip("the target answers a long request too fast for this test")
    _, stream, _ = _begun(engine, 1)
    stream.cancel()
    # Before the request would have ended by itself.
    end = time.monotonic() + engine.long_seconds / 2
    while True:
        status = control.GetStatus(pb.GetStatusRequest(), timeout=engine.timeout).status
        assert status.HasField("running")
        if status.running == 0 and status.waiting == 0:
            return
        assert time.monotonic() < end, f"{status.running} requests still run after their callers left"
        time.sleep(0.05)
