"""What requests see of the fleet behind the router."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from vime_proto.conformance._calls import new_id, refused
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.router.v1 import router_pb2 as pb

DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED


def test_requests_spread_over_the_fleet(router):
    engines = {router.add(), router.add(), router.add()}
    if router.list().policy not in ("round_robin", "least_outstanding_tokens", "power_of_two"):
        pytest.skip(f"the policy {router.list().policy!r} may prefer one engine")
    results: list[str] = []
    work = lambda: results.append(router.generate(router.request(tokens=20)).last.engine_id)  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == engines


def test_requests_wait_for_an_engine(router):
    results: list = []
    thread = threading.Thread(target=lambda: results.append(router.generate()))
    thread.start()
    time.sleep(0.3)
    assert not results and router.list().queued == 1
    engine_id = router.add()
    thread.join(router.timeout)
    assert results[0].last.engine_id == engine_id
    router.wait(lambda: router.list().queued == 0)


def test_a_request_that_found_no_engine_leaves_the_queue(router):
    with refused(DEADLINE):
        list(router.start(router.request(), timeout=0.3))
    router.wait(lambda: router.list().queued == 0)


def test_a_dead_engine_is_passed_over(router):
    dead, alive = router.add(), router.add()
    router.host.stop(dead)
    for _ in range(6):
        assert router.generate().last.engine_id == alive
    router.wait(lambda: router.entry(dead).health == pb.ENGINE_HEALTH_UNHEALTHY)
    assert router.entry(dead).reason


def test_a_stale_engine_is_kept_but_gets_nothing(router):
    stale, good = router.add(), router.add()
    router.host.make_stale(stale)
    router.wait(lambda: router.entry(stale).health == pb.ENGINE_HEALTH_INELIGIBLE)
    for _ in range(4):
        assert router.generate().last.engine_id == good


def test_a_slow_engine_is_not_a_failing_one(router):
    engine_id = router.add(step_seconds=0.5)
    answer = router.generate(router.request(tokens=6))
    assert len(answer.tokens) == 6
    entry = router.entry(engine_id)
    assert entry.health == pb.ENGINE_HEALTH_HEALTHY and entry.failures_total == 0


def test_engines_below_the_minimum_version_get_nothing(router):
    old, new = router.add(number=0), router.add(number=1)
    router.minimum(router.version(1))
    router.wait(lambda: router.entry(old).health == pb.ENGINE_HEALTH_INELIGIBLE)
    assert router.list().minimum_version == router.version(1)
    for _ in range(4):
        assert router.generate().last.engine_id == new
    router.host.set_version(old, router.version(1))
    router.wait(lambda: router.entry(old).health == pb.ENGINE_HEALTH_HEALTHY)


def test_requests_wait_for_the_minimum_version(router):
    engine_id = router.add(number=0)
    router.minimum(router.version(1))
    router.wait(lambda: router.entry(engine_id).health == pb.ENGINE_HEALTH_INELIGIBLE)
    results: list = []
    thread = threading.Thread(target=lambda: results.append(router.generate()))
    thread.start()
    time.sleep(0.3)
    assert not results
    router.host.set_version(engine_id, router.version(1))
    thread.join(router.timeout)
    assert results[0].last.version == router.version(1)


def test_another_lineage_never_satisfies(router):
    engine_id = router.add(number=5)
    router.minimum(router.version(1, lineage=1))
    router.wait(lambda: router.entry(engine_id).health == pb.ENGINE_HEALTH_INELIGIBLE)


def test_the_bound_can_be_taken_away(router):
    engine_id = router.add(number=0)
    router.minimum(router.version(3))
    router.wait(lambda: router.entry(engine_id).health == pb.ENGINE_HEALTH_INELIGIBLE)
    router.minimum(None)
    router.wait(lambda: router.entry(engine_id).health == pb.ENGINE_HEALTH_HEALTHY)
    assert not router.list().HasField("minimum_version")


def test_an_abort_reaches_the_engine_past_dead_ones(router):
    dead = router.add()
    router.host.stop(dead)
    alive = router.add(step_seconds=0.02)
    request = router.request(tokens=200)
    stream = router.start(request)
    first = next(stream)
    answer = router.rollout.Abort(rollout_pb2.AbortRequest(request_ids=[request.request_id]), timeout=router.timeout)
    assert list(answer.aborted) == [request.request_id]
    rest = list(stream)
    assert first.engine_id == alive
    assert rest[-1].finish_reason, "the stream ends by its last message, not by an error"


def test_aborting_everything_survives_dead_engines(router):
    router.add()
    router.host.stop(router.add())
    router.rollout.Abort(rollout_pb2.AbortRequest(), timeout=router.timeout)


def test_a_cancelled_call_is_cancelled_at_the_engine(router):
    engine_id = router.add(step_seconds=0.1)
    stream = router.start(router.request(tokens=200))
    next(stream)
    stream.cancel()
    router.wait(lambda: router.host.running(engine_id) == 0, seconds=8)
    router.wait(lambda: router.entry(engine_id).outstanding_requests == 0, seconds=8)


def test_a_repeated_id_gets_the_answer_of_the_same_engine(router):
    for _ in range(3):
        router.add()
    request = router.request(tokens=8)
    first = router.generate(request)
    for _ in range(3):
        again = router.generate(request)
        assert again.tokens == first.tokens and again.last.engine_id == first.last.engine_id


def test_an_engine_that_dies_after_the_first_token_is_not_retried(router):
    engine_id = router.add(step_seconds=0.05)
    router.add()
    request = router.request(tokens=100)
    request.request_id = new_id()
    stream = router.start(request)
    first = next(stream)
    router.host.stop(first.engine_id)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
    assert engine_id


def test_refusals_of_the_engine_come_through(router):
    router.add()
    request = router.request()
    request.sampling.ClearField("max_new_tokens")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, field="max_new_tokens"):
        list(router.start(request))
