"""Pausing, sleeping, and what requests in flight see of it."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from vime_proto.conformance._calls import INVALID, PRECONDITION, UNAVAILABLE, new_id, refused
from vime_proto.conformance._rollout_client import Answer
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import check_version

DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED


def _begun(engine, **fields):
    """A long request, its open stream, and its first messages."""
    request = engine.long_request(**fields)
    stream = engine.start(request)
    return request, stream, [next(stream)]


def _later(call) -> tuple[threading.Thread, list]:
    """The call, running in a thread, and where its result will be."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_a_serving_engine_states_what_it_is(engine):
    status = engine.status()
    assert status.state == pb.ENGINE_STATE_SERVING
    assert status.engine_id and status.transports
    check_version(status.version)
    assert status.HasField("running") and status.HasField("waiting")
    assert status.layout.tensor_parallel >= 1 and status.layout.data_parallel >= 1
    assert not status.update_id and not status.reason


def test_pausing_and_resuming_may_be_repeated(engine):
    for _ in range(2):
        assert engine.pause().status.state == pb.ENGINE_STATE_PAUSED
    for _ in range(2):
        assert engine.resume().status.state == pb.ENGINE_STATE_SERVING


def test_a_repeated_request_changes_nothing(engine):
    request_id = new_id()
    first = engine.pause(request_id=request_id)
    engine.resume()
    assert engine.pause(request_id=request_id) == first
    assert engine.status().state == pb.ENGINE_STATE_SERVING


def test_a_repeated_request_with_another_payload_is_refused(engine):
    request_id = new_id()
    engine.pause(request_id=request_id)
    with refused(INVALID, names=request_id):
        engine.pause(request_id=request_id, in_flight=pb.IN_FLIGHT_POLICY_KEEP)


def test_a_control_call_needs_a_request_id(engine):
    with refused(INVALID, field="request_id"):
        engine.control.Pause(pb.PauseRequest(), timeout=engine.timeout)


def test_generation_waits_while_paused(engine):
    engine.pause()
    thread, results = _later(lambda: engine.generate(max_new_tokens=2, ignore_eos=True))
    time.sleep(0.3)
    assert not results
    engine.resume()
    thread.join(engine.timeout)
    assert len(results[0].tokens) == 2


def test_abort_ends_requests_with_what_they_have(engine):
    began = time.monotonic()
    request, stream, messages = _begun(engine)
    seconds = time.monotonic() - began
    paused = engine.pause(in_flight=pb.IN_FLIGHT_POLICY_ABORT)
    answer = Answer(messages + list(stream))
    answer.check(request)
    engine.ended_early(answer, seconds)
    assert list(paused.aborted) == [request.request_id]
    assert paused.status.state == pb.ENGINE_STATE_PAUSED and paused.status.running == 0


def test_abort_is_the_default(engine):
    began = time.monotonic()
    request, stream, messages = _begun(engine)
    seconds = time.monotonic() - began
    engine.pause()
    answer = Answer(messages + list(stream))
    answer.check(request)
    engine.ended_early(answer, seconds)


def test_keep_lets_requests_go_on_afterwards(engine):
    request, stream, messages = _begun(engine)
    paused = engine.or_skip("keep", lambda: engine.pause(in_flight=pb.IN_FLIGHT_POLICY_KEEP))
    assert not paused.aborted
    engine.resume()
    answer = Answer(messages + list(stream))
    answer.check(request)
    assert answer.last.finish_reason == sample_pb2.FINISH_REASON_LENGTH
    assert len(answer.tokens) == request.sampling.max_new_tokens


def test_wait_needs_a_limit(engine):
    with refused(INVALID, field="wait_seconds"):
        engine.pause(in_flight=pb.IN_FLIGHT_POLICY_WAIT)
    assert engine.status().state == pb.ENGINE_STATE_SERVING


def test_wait_lets_requests_end(engine):
    request = engine.request(max_new_tokens=16, ignore_eos=True)
    stream = engine.start(request)
    messages = [next(stream)]
    paused = engine.pause(in_flight=pb.IN_FLIGHT_POLICY_WAIT, wait_seconds=20)
    assert paused.status.state == pb.ENGINE_STATE_PAUSED and not paused.aborted
    answer = Answer(messages + list(stream))
    answer.check(request)
    assert len(answer.tokens) == 16


def test_a_wait_that_is_too_short_leaves_the_engine_serving(engine):
    request, stream, messages = _begun(engine)
    try:
        engine.pause(in_flight=pb.IN_FLIGHT_POLICY_WAIT, wait_seconds=0.01)
    except grpc.RpcError as error:
        assert error.code() in (DEADLINE, PRECONDITION)
        assert engine.status().state == pb.ENGINE_STATE_SERVING
    else:
        pytest.skip("the target answered before the wait was over")
    answer = Answer(messages + list(stream))
    answer.check(request)
    assert answer.last.finish_reason == sample_pb2.FINISH_REASON_LENGTH, "nothing half done: the request goes on"


def _sleep(engine, level: int = 1) -> pb.EngineStatus:
    call = lambda: engine.call("Sleep", pb.SleepRequest, level=level).status  # noqa: E731
    return engine.or_skip(f"sleep at level {level}", call)


def _wake(engine, **fields) -> pb.EngineStatus:
    return engine.call("Wake", pb.WakeRequest, **fields).status


def test_an_engine_asleep_answers_unavailable_and_wakes_as_it_was(engine):
    before = engine.greedy()
    status = _sleep(engine)
    assert (status.state, status.sleep_level) == (pb.ENGINE_STATE_ASLEEP, 1)
    with refused(UNAVAILABLE):
        engine.generate()
    with refused(PRECONDITION):
        engine.resume()
    with refused(PRECONDITION):
        _wake(engine, kv_cache=True)
    assert _wake(engine, weights=True).state == pb.ENGINE_STATE_AWAKE_WEIGHTS
    assert _wake(engine, kv_cache=True).state == pb.ENGINE_STATE_SERVING
    assert engine.greedy() == before


def test_one_call_wakes_weights_and_cache(engine):
    _sleep(engine)
    assert _wake(engine, weights=True, kv_cache=True).state == pb.ENGINE_STATE_SERVING


def test_generation_waits_until_the_cache_is_awake(engine):
    _sleep(engine)
    _wake(engine, weights=True)
    thread, results = _later(lambda: engine.generate(max_new_tokens=2, ignore_eos=True))
    time.sleep(0.3)
    assert not results
    _wake(engine, kv_cache=True)
    thread.join(engine.timeout)
    assert len(results[0].tokens) == 2


def test_an_unknown_sleep_level_is_refused(engine):
    with refused(INVALID, field="level"):
        engine.call("Sleep", pb.SleepRequest, level=3)


def test_level_two_loses_the_version_and_needs_a_full_update(engine, any_transport):
    assert engine.weights
    status = _sleep(engine, 2)
    assert not status.HasField("version")
    assert _wake(engine, weights=True).state == pb.ENGINE_STATE_AWAKE_WEIGHTS
    with refused(PRECONDITION):
        _wake(engine, kv_cache=True)
    engine.push(any_transport)
    assert _wake(engine, kv_cache=True).state == pb.ENGINE_STATE_SERVING
    assert engine.generate().last.version == engine.newest
