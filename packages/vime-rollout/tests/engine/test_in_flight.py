"""What becomes of running requests when weights change, and what versions their tokens state."""

import threading
import time

import grpc
import models
import numpy as np
import pytest
from pushing import manifest_of, new_id
from reference import Reference

from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.tensor import to_numpy

ABORT, KEEP, WAIT = pb.IN_FLIGHT_POLICY_ABORT, pb.IN_FLIGHT_POLICY_KEEP, pb.IN_FLIGHT_POLICY_WAIT
PROMPT = [1, 5, 9]
LENGTH = 240


@pytest.fixture
def other(moe, tmp_path):
    """Other weights and their reference; the engine gets its own back afterwards."""
    tensors = models.weights(moe.config, 77)
    yield tensors, Reference.of(tmp_path / "other", moe.config, tensors)
    moe.pusher().push(moe.tensors, moe.next_version())


def start(engine, **more):
    stream = engine.stream(PROMPT, LENGTH, ignore_eos=True, **more)
    return stream, [next(stream)]


def finish(stream, messages):
    from conftest import Answer

    return Answer([*messages, *stream])


def test_abort_ends_requests_at_an_exact_version_boundary(moe, other):
    before = moe.status().version
    stream, messages = start(moe, request_id="cut", return_routing=True)
    manifest, parts = manifest_of(other[0], moe.next_version())
    pusher = moe.pusher()
    pusher.write(manifest, parts)
    begun = pusher.begin(manifest)
    assert list(begun.aborted) == ["cut"] and begun.status.state == pb.ENGINE_STATE_RECEIVING
    answer = finish(stream, messages)
    assert answer.finish == "ABORT" and 0 < len(answer.tokens) < LENGTH
    assert set(answer.versions) == {before.number}
    # Without a stated policy: every row is of the weights that sampled, so that replay is exact.
    header = answer.last.routing.header
    assert header.rows == len(PROMPT) + len(answer.tokens) - 1 and not header.holes and not header.inexact
    assert {span.version.number for span in header.spans} == {before.number}
    late = moe.stream([*PROMPT, *answer.tokens], 8, ignore_eos=True, return_routing=True)  # waits for the new weights
    pusher.load(manifest, parts)
    committed = pusher.commit(manifest).status
    assert committed.version == manifest.version
    # Whoever sends weights sees on what kernels they landed.
    assert committed.kernel_backends["platform"] and committed.kernel_backends == moe.status().kernel_backends
    rest = finish(late, [])
    assert set(rest.versions) == {manifest.version.number}
    header = rest.last.routing.header
    assert header.rows == len(PROMPT) + len(answer.tokens) + 8 - 1 and not header.holes and not header.inexact
    assert {span.version.number for span in header.spans} == {manifest.version.number}
    assert np.abs(answer.logprobs - Reference(moe.folder).of_response(PROMPT, answer.tokens)).max() < 1e-5
    expected = other[1].of_response([*PROMPT, *answer.tokens], rest.tokens)
    assert np.abs(rest.logprobs - expected).max() < 1e-5


def test_kept_requests_go_on_and_every_token_states_its_weights(moe, other):
    before = moe.status().version.number
    streams = [moe.stream(PROMPT, LENGTH, ignore_eos=True, return_routing=True) for _ in range(4)]
    streams = [(stream, [next(stream)]) for stream in streams]
    version = moe.next_version()
    moe.pusher().push(other[0], version, in_flight=KEEP)
    # The reader is late: it takes its messages only now.
    old, new = Reference(moe.folder), other[1]
    for stream, messages in streams:
        answer = finish(stream, messages)
        assert answer.finish == "LENGTH" and len(answer.tokens) == LENGTH
        assert set(answer.token_versions) == {before, version.number}
        first = answer.token_versions.index(version.number)
        assert answer.token_versions == [before] * first + [version.number] * (LENGTH - first)
        assert np.abs(answer.logprobs[:first] - old.of_response(PROMPT, answer.tokens)[:first]).max() < 1e-5
        # The prefix is computed again under the new weights, so that what follows is the new policy's own.
        assert np.abs(answer.logprobs[first:] - new.of_response(PROMPT, answer.tokens)[first:]).max() < 1e-5
        header = answer.last.routing.header
        boundary = len(PROMPT) + first - 1
        rows = [(span.rows.start, span.rows.stop, span.version.number) for span in header.spans]
        assert rows == [(0, boundary, before), (boundary, header.rows, version.number)]
        assert [(one.start, one.stop) for one in header.inexact] == [(boundary, header.rows)]


def test_waiting_lets_requests_finish_or_gives_up_at_its_deadline(moe, other):
    stream, messages = start(moe)
    manifest, parts = manifest_of(other[0], moe.next_version())
    pusher = moe.pusher()
    pusher.write(manifest, parts)
    with pytest.raises(grpc.RpcError) as error:
        pusher.begin(manifest, WAIT, wait_seconds=0.01)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert moe.status().state == pb.ENGINE_STATE_SERVING
    pusher.begin(manifest, WAIT, wait_seconds=60)
    answer = finish(stream, messages)
    assert answer.finish == "LENGTH" and len(answer.tokens) == LENGTH
    pusher.load(manifest, parts)
    pusher.commit(manifest)
    with pytest.raises(grpc.RpcError) as error:
        moe.control.Pause(pb.PauseRequest(request_id=new_id(), in_flight=WAIT), timeout=10)
    assert "wait_seconds" in error.value.details()


def test_pause_holds_new_requests_until_resume(moe):
    assert moe.control.Pause(pb.PauseRequest(request_id=new_id()), timeout=10).status.state == pb.ENGINE_STATE_PAUSED
    stream = moe.stream(PROMPT, 2, ignore_eos=True)
    got = []
    reader = threading.Thread(target=lambda: got.extend(stream))
    reader.start()
    deadline = time.monotonic() + 5
    while not moe.status().waiting:
        assert time.monotonic() < deadline
    assert not got
    assert moe.control.Resume(pb.ResumeRequest(request_id=new_id()), timeout=10).status.state == pb.ENGINE_STATE_SERVING
    reader.join(30)
    assert sum(to_numpy(one.token_ids).size for one in got) == 2


def test_pause_keeps_requests_when_asked(moe):
    stream, messages = start(moe)
    paused = moe.control.Pause(pb.PauseRequest(request_id=new_id(), in_flight=KEEP), timeout=10)
    assert not paused.aborted
    moe.control.Resume(pb.ResumeRequest(request_id=new_id()), timeout=10)
    answer = finish(stream, messages)
    assert answer.finish == "LENGTH"
    assert answer.tokens == moe.generate(PROMPT, LENGTH, ignore_eos=True).tokens


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(moe, level):
    moe.control.Sleep(pb.SleepRequest(request_id=new_id(), level=level), timeout=30)
    assert moe.status().state == pb.ENGINE_STATE_ASLEEP and moe.status().sleep_level == level
    with pytest.raises(grpc.RpcError) as error:
        moe.generate(PROMPT, 1)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    status = moe.control.Wake(pb.WakeRequest(request_id=new_id(), weights=True), timeout=30).status
    assert status.state == pb.ENGINE_STATE_AWAKE_WEIGHTS and status.HasField("version") == (level == 1)
    if level == 2:
        with pytest.raises(grpc.RpcError) as error:
            moe.control.Wake(pb.WakeRequest(request_id=new_id(), kv_cache=True), timeout=30)
        assert "full update" in error.value.details()
        done = moe.pusher().push(moe.tensors, moe.next_version())
        assert done.status.state == pb.ENGINE_STATE_AWAKE_WEIGHTS
    moe.control.Wake(pb.WakeRequest(request_id=new_id(), kv_cache=True), timeout=30)
    assert moe.status().state == pb.ENGINE_STATE_SERVING
    answer = moe.generate(PROMPT, 6, ignore_eos=True)
    assert np.abs(answer.logprobs - Reference(moe.folder).of_response(PROMPT, answer.tokens)).max() < 1e-5
