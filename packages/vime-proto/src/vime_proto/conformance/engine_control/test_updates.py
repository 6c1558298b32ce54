"""Weight updates that succeed: every transport, chunking and number of sources."""

from __future__ import annotations

import threading
import time

import pytest

from vime_proto.conformance._calls import INVALID, PRECONDITION, new_id, refused
from vime_proto.conformance._rollout_client import Answer
from vime_proto.rollout.v1 import rollout_pb2 as pb


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("several", [False, True])
def test_a_version_becomes_live_on_commit_only(engine, transport, sources, several):
    update = engine.update(sources=sources, several=several)
    before = engine.status().version
    begun = engine.begin(update, transport)
    assert begun.status.state == pb.ENGINE_STATE_RECEIVING and begun.status.update_id == update.update_id
    loaded = sum(engine.send(update, transport, source) for source in update.streams)
    assert loaded == update.size
    assert engine.status().version == before
    done = engine.commit(update)
    assert (done.status.state, done.status.version) == (pb.ENGINE_STATE_SERVING, update.manifest.version)
    assert done.HasField("bytes") and done.bytes == update.size and done.HasField("seconds")
    assert engine.generate().last.version == update.manifest.version
    info = engine.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=engine.timeout)
    assert info.version == update.manifest.version


@pytest.mark.parametrize("several", [False, True])
def test_the_same_weights_again_leave_the_output_bit_identical(engine, transport, several):
    engine.push(transport)
    first = engine.greedy()
    for _ in range(3):
        engine.push(transport, engine.update(several=several))
        assert engine.greedy() == first


def test_a_source_with_nothing_to_send_is_no_fault(engine, any_transport):
    update = engine.update(sources=len(engine.weights) + 2)
    assert any(not chunks for chunks in update.streams.values())
    assert engine.push(any_transport, update).status.version == update.manifest.version


def test_chunks_without_checksum_are_covered_by_the_totals(engine, any_transport):
    update = engine.update(checksums=False)
    assert engine.push(any_transport, update).status.state == pb.ENGINE_STATE_SERVING


def test_commit_waits_for_every_source(engine, transport):
    update = engine.update(sources=2, several=True)
    engine.begin(update, transport)
    first, second = update.streams
    engine.send(update, transport, first)
    done: list = []
    thread = threading.Thread(target=lambda: done.append(engine.commit(update)))
    thread.start()
    time.sleep(1.0)
    assert not done, "the second source has not sent yet"
    engine.send(update, transport, second)
    thread.join(engine.timeout)
    assert done and done[0].status.version == update.manifest.version


def test_generation_waits_for_the_update_and_sees_the_new_version(engine, any_transport):
    update = engine.update()
    engine.begin(update, any_transport)
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate(max_new_tokens=3, ignore_eos=True)))
    thread.start()
    time.sleep(0.3)
    assert not answers
    for source in update.streams:
        engine.send(update, any_transport, source)
    engine.commit(update)
    thread.join(engine.timeout)
    assert {message.version.number for message in answers[0].messages} == {update.manifest.version.number}


def test_by_default_requests_in_flight_end_at_the_old_version(engine, any_transport):
    update, before = engine.update(), engine.status().version
    request, began = engine.long_request(), time.monotonic()
    stream = engine.start(request)
    messages = [next(stream)]
    seconds = time.monotonic() - began
    begun = engine.begin(update, any_transport)
    answer = Answer(messages + list(stream))
    answer.check(request)
    assert all(message.version == before for message in answer.messages)
    engine.ended_early(answer, seconds)
    assert list(begun.aborted) == [request.request_id]


def test_kept_requests_state_the_version_of_each_token(engine, any_transport):
    update, before = engine.update(), engine.status().version
    request = engine.long_request()
    stream = engine.start(request)
    messages = [next(stream)]
    engine.or_skip("keep", lambda: engine.begin(update, any_transport, in_flight=pb.IN_FLIGHT_POLICY_KEEP))
    for source in update.streams:
        engine.send(update, any_transport, source)
    engine.commit(update)
    answer = Answer(messages + list(stream))
    answer.check(request)
    numbers = [message.version.number for message in answer.messages]
    assert numbers == sorted(numbers) and set(numbers) <= {before.number, update.manifest.version.number}
    assert numbers[-1] == update.manifest.version.number
    assert len(answer.tokens) == request.sampling.max_new_tokens


def test_the_prefix_cache_never_serves_an_older_version(engine, any_transport):
    prompt = engine.prompt(64) if engine.info.max_model_len > 80 else engine.prompt(8)
    for _ in range(2):
        engine.generate(prompt=prompt, max_new_tokens=2)
    engine.push(any_transport)
    first = engine.generate(prompt=prompt, max_new_tokens=2).messages[0]
    assert first.cached_tokens == 0


def test_an_engine_may_stay_paused(engine, any_transport):
    update = engine.update()
    engine.begin(update, any_transport)
    for source in update.streams:
        engine.send(update, any_transport, source)
    assert engine.commit(update, stay_paused=True).status.state == pb.ENGINE_STATE_PAUSED
    assert engine.resume().status.version == update.manifest.version


def test_a_paused_engine_takes_an_update(engine, any_transport):
    engine.pause()
    assert engine.push(any_transport).status.state == pb.ENGINE_STATE_SERVING


def test_beginning_twice_at_once_is_one_update(engine, any_transport):
    update, request_id, answers = engine.update(), new_id(), []
    call = lambda: answers.append(engine.begin(update, any_transport, request_id=request_id))  # noqa: E731
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 2 and answers[0] == answers[1]


def test_two_updates_at_once_are_one_too_many(engine, any_transport):
    first, second = engine.update(), engine.update()
    engine.begin(first, any_transport)
    with refused(PRECONDITION, names=first.update_id):
        engine.begin(second, any_transport)
    assert engine.status().update_id == first.update_id


def test_a_repeated_commit_answers_the_same(engine, any_transport):
    update, request_id = engine.update(), new_id()
    engine.begin(update, any_transport)
    for source in update.streams:
        engine.send(update, any_transport, source)
    first = engine.commit(update, request_id=request_id)
    assert engine.commit(update, request_id=request_id) == first
    with refused(INVALID, names=request_id):
        engine.commit(update, request_id=request_id, stay_paused=True)
