"""Registration, leases, draining, listing."""

from __future__ import annotations

import time

import grpc
import pytest

from vime_proto.conformance._calls import EXISTS, INVALID, NOT_FOUND, UNAVAILABLE, new_id, refused
from vime_proto.conformance._rollout_client import Answer
from vime_proto.router.v1 import router_pb2 as pb


def test_an_engine_is_listed_with_its_status(router):
    engine_id = router.add(number=0, labels={"pool": "train"})
    entry = router.entry(engine_id)
    assert entry.health == pb.ENGINE_HEALTH_HEALTHY and entry.labels["pool"] == "train"
    assert entry.status.version == router.version(0) and entry.status.HasField("version")
    assert entry.HasField("outstanding_requests") and entry.outstanding_requests == 0
    assert not entry.HasField("lease_seconds"), "absent: for ever"
    assert router.list().policy


def test_engines_are_listed_in_order_and_by_label(router):
    train = [router.add(labels={"pool": "train"}) for _ in range(2)]
    other = router.add(labels={"pool": "eval"})
    listed = [entry.engine_id for entry in router.list().engines]
    assert listed == sorted([*train, other])
    assert [entry.engine_id for entry in router.list(labels={"pool": "eval"}).engines] == [other]
    assert not router.list(labels={"pool": "none"}).engines


def test_registering_again_changes_nothing(router):
    engine_id = router.add()
    address = router.entry(engine_id).address
    router.register(engine_id, address)
    assert len(router.list().engines) == 1


def test_another_address_under_a_live_id_is_refused(router):
    engine_id = router.add()
    with refused(EXISTS, names=engine_id):
        router.register(engine_id, "127.0.0.1:9")


def test_a_repeated_request_with_another_payload_is_refused(router):
    engine_id, request_id = router.add(), new_id()
    address = router.entry(engine_id).address
    router.register(engine_id, address, request_id=request_id)
    with refused(INVALID, names=request_id):
        router.register(engine_id, address, request_id=request_id, labels={"x": "y"})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"engine_id": "", "address": "127.0.0.1:9"}, "engine_id"),
        ({"engine_id": "e", "address": ""}, "address"),
        ({"engine_id": "e", "address": "::1:9"}, "address"),
        ({"engine_id": "e", "address": "host"}, "address"),
        ({"engine_id": "e", "address": "127.0.0.1:9", "lease_seconds": 0.0}, "lease_seconds"),
    ],
)
def test_a_bad_registration_is_refused_by_field(router, fields, field):
    with refused(INVALID, field=field):
        router.call("RegisterEngine", pb.RegisterEngineRequest, **fields)
    assert not router.list().engines


def test_a_lease_lapses_unless_it_is_renewed(router):
    engine_id = router.add()
    address = router.entry(engine_id).address
    entry = router.register(engine_id, address, lease_seconds=1.0)
    assert entry.HasField("lease_seconds") and 0 < entry.lease_seconds <= 1.0
    for _ in range(4):
        time.sleep(0.4)
        router.register(engine_id, address, lease_seconds=1.0)
    assert router.list().engines
    router.wait(lambda: not router.list().engines)


@pytest.mark.parametrize("method", ["DeregisterEngine", "DrainEngine"])
def test_an_unknown_engine_is_named(router, method):
    with refused(NOT_FOUND, names="nobody"):
        router.call(method, getattr(pb, f"{method}Request"), engine_id="nobody")


def test_a_removed_engine_fails_its_requests_with_unavailable(router):
    engine_id = router.add(step_seconds=0.1)
    stream = router.start(router.request(tokens=200))
    next(stream)
    router.deregister(engine_id)
    with refused(UNAVAILABLE):
        list(stream)
    assert not router.list().engines
    router.wait(lambda: router.host.running(engine_id) == 0, seconds=8)


def test_a_draining_engine_finishes_and_takes_nothing_new(router):
    first = router.add(step_seconds=0.01)
    request = router.request(tokens=40)
    stream = router.start(request)
    messages = [next(stream)]
    assert router.drain(first).health == pb.ENGINE_HEALTH_DRAINING
    second = router.add()
    for _ in range(4):
        assert router.generate().last.engine_id == second
    answer = Answer(messages + list(stream))
    answer.check(request)
    assert len(answer.tokens) == 40 and answer.last.engine_id == first
    assert router.entry(first).health == pb.ENGINE_HEALTH_DRAINING


def test_a_drained_engine_may_come_back(router):
    engine_id = router.add()
    router.drain(engine_id)
    with pytest.raises(grpc.RpcError):
        list(router.start(router.request(), timeout=0.5))
    router.drain(engine_id, undo=True)
    router.wait(lambda: router.entry(engine_id).health == pb.ENGINE_HEALTH_HEALTHY)
    assert router.generate().last.engine_id == engine_id


def test_a_drained_engine_that_is_started_again_serves(router):
    engine_id = router.add()
    address = router.entry(engine_id).address
    router.drain(engine_id)
    router.host.stop(engine_id)
    # Killed: nobody deregistered it.
    router.host.start(engine_id, router.version(0), address=address)
    router.register(engine_id, address)
    router.wait(lambda: router.entry(engine_id).health == pb.ENGINE_HEALTH_HEALTHY, seconds=30)
    assert router.generate().last.engine_id == engine_id


def test_a_drained_engine_may_leave_by_itself(router):
    engine_id = router.add(step_seconds=0.01)
    request = router.request(tokens=30)
    stream = router.start(request)
    messages = [next(stream)]
    router.drain(engine_id, then_remove=True)
    answer = Answer(messages + list(stream))
    answer.check(request)
    router.wait(lambda: not router.list().engines)


def test_counts_come_back_to_zero(router):
    engine_id = router.add()
    for _ in range(5):
        router.generate()
    entry = router.entry(engine_id)
    assert (entry.outstanding_requests, entry.requests_total, entry.failures_total) == (0, 5, 0)
