"""Leases: renewed, aborted, given back with what there was, continued, fenced."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from worker_models import ABORT, RUN, STOP, ScriptedEngine, answering, delta, ids_of, until

from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import open_channel, wait_serving
from vime_proto.errors import StatusError
from vime_proto.fakes import FakeBuffer, serve
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.server import ServerOptions
from vime_rollout.worker._buffer import BufferClient
from vime_rollout.worker._errors import FatalError
from vime_rollout.worker._group import GroupRun


async def test_leases_of_long_generations_are_renewed(stage, prompts):
    async def slow(request, seen):
        await asyncio.sleep(4.0)
        yield delta([5, 2], 0, STOP)

    one = await stage(slow, prompts[:2], ttl=3.0)
    await one.open_run()
    one.worker()
    await one.batch()
    stats = await one.stats()
    assert stats.leases_lapsed_total == 0 and stats.groups_committed_total == 2


async def test_a_lease_that_is_told_to_abort_stops_generating(stage, prompts):
    async def endless(request, seen):
        yield delta([5], 0)
        await asyncio.sleep(60)

    one = await stage(endless, prompts[:1], ttl=3.0)
    await one.open_run(batch_groups=1)
    calls = []

    def renew(run, lease_ids):
        calls.append(lease_ids)
        return [buffer_pb2.LEASE_DIRECTIVE_ABORT for _ in lease_ids]

    keep, one.buffer.store.renew = one.buffer.store.renew, renew
    one.worker()
    await until(lambda: one.engine.cancelled >= 2)
    one.buffer.store.renew, one.engine.script = keep, answering([5, 2])
    (group,) = await one.groups(await one.batch())
    assert calls and group.rollouts[0].attempt > 1


async def test_an_abort_of_a_lease_that_is_being_given_back_leaves_its_place_free(stage, prompts, monkeypatch):
    one = await stage(answering([5, 2]), prompts[:1], ttl=3.0)
    await one.open_run(batch_groups=1)
    store = one.buffer.store
    run, renew, give_back, told = GroupRun.run, store.renew, BufferClient.release, asyncio.Event()

    def abort_all(run, lease_ids):
        told.set()
        return [buffer_pb2.LEASE_DIRECTIVE_ABORT] * len(lease_ids)

    async def broken(self):
        store.renew = abort_all
        monkeypatch.setattr(GroupRun, "run", run)
        raise RuntimeError("made to fail")

    async def slow(*arguments, **options):
        await told.wait()
        # The answer to the renewal is on its way; it must not cancel what waits here.
        await asyncio.sleep(0.2)
        store.renew = renew
        return await give_back(*arguments, **options)

    monkeypatch.setattr(GroupRun, "run", broken)
    monkeypatch.setattr(BufferClient, "release", slow)
    one.worker(max_groups_in_flight=1)
    (group,) = await one.groups(await one.batch())
    assert group.rollouts[0].attempt == 2


async def test_a_stopped_worker_gives_its_leases_back_with_what_there_is(stage, prompts):
    async def halting(request, seen):
        yield delta([10, 11, 12], 0)
        await asyncio.sleep(60)

    one = await stage(halting, prompts[:1])
    await one.open_run(batch_groups=1, group_size=2)
    worker = one.worker()
    await until(lambda: one.engine.running == 2)
    await asyncio.sleep(0.2)
    one.stop.set()
    async with asyncio.timeout(30):
        await worker
    (row,) = [one for one in one.buffer.store.runs[RUN].prompts.values()]
    assert [partial.status for partial in row.partial] == [pb.ROLLOUT_STATUS_ABORTED] * 2
    one.engine.requests.clear()

    async def finishing(request, seen):
        yield delta([13, 2], 0, STOP)

    one.engine.script = finishing
    one.stop = asyncio.Event()
    one.worker()
    (group,) = await one.groups(await one.batch())
    for rollout in group.rollouts:
        ids = [ids_of(segment.token_ids) for segment in rollout.samples[0].segments[1:]]
        assert ids == [[10, 11, 12], [13, 2]] and rollout.attempt == 2
        reasons = [segment.generation.finish_reason for segment in rollout.samples[0].segments[1:]]
        assert reasons == [ABORT, STOP]
    assert [request.sampling.max_new_tokens for request in one.engine.requests] == [13, 13]
    one.stop.set()


async def test_a_worker_of_the_same_name_takes_over_at_once(stage, prompts):
    """What a worker held that was killed is leased again without waiting for its lease to lapse."""

    async def halting(request, seen):
        await asyncio.sleep(60)
        yield delta([5], 0)

    one = await stage(halting, prompts[:1], ttl=600.0)
    await one.open_run(batch_groups=1)
    first = one.worker()
    await until(lambda: one.engine.running == 2)
    # A killed process releases nothing: the buffer still counts the lease.
    one.buffer.ReleaseLease = None
    one.engine.script = answering([5, 2])
    second = one.worker()
    (group,) = await one.groups(await one.batch(5.0))
    assert group.rollouts[0].attempt == 2
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_a_worker_waits_until_the_run_is_opened(stage, prompts):
    one = await stage(answering([5, 2]), prompts[:2])
    one.worker()
    await asyncio.sleep(0.7)
    await one.open_run()
    assert len((await one.batch()).groups) == 2


async def test_a_run_that_is_never_opened_ends_the_worker_with_its_name(stage, prompts):
    one = await stage(answering([5, 2]), prompts, run_id="mistyped", connect_seconds=5.0)
    with pytest.raises(FatalError, match="no run 'mistyped'"):
        await one.worker()


async def test_a_missing_engine_ends_the_worker_with_its_address(stage, prompts):
    one = await stage(answering([5, 2]), prompts, rollout="127.0.0.1:1", connect_seconds=0.5)
    with pytest.raises(FatalError, match=r"no model at 127\.0\.0\.1:1"):
        await one.worker()


async def test_a_closed_run_ends_the_worker_although_it_generates(stage, prompts):
    async def endless(request, seen):
        await asyncio.sleep(60)
        yield delta([5], 0)

    one = await stage(endless, prompts[:1], ttl=600.0)
    await one.open_run(batch_groups=1)
    one.buffer.store.renew = lambda run, ids: [buffer_pb2.LEASE_DIRECTIVE_ABORT] * len(ids)
    worker = one.worker(max_groups_in_flight=2)
    await until(lambda: one.engine.running == 2)
    await one.close_run()
    async with asyncio.timeout(30):
        await worker


async def test_a_group_that_is_refused_is_given_back_as_a_failed_attempt(stage, prompts):
    async def script(request, seen):
        yield delta([5, 2], 0, STOP)

    one = await stage(script, prompts[:1])
    await one.open_run(batch_groups=1, max_attempts=2)

    def refuse(*_):
        raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, "group.rollouts: made to fail")

    one.buffer.store.commit = refuse
    counters = await asyncio.wait_for(one.worker(), 10)
    assert counters["groups_refused"] == 2
    assert (await one.stats()).prompts_dropped_total == 1


async def test_a_commit_whose_lease_is_gone_is_dropped(stage, prompts):
    one = await stage(answering([5, 2]), prompts[:1])
    await one.open_run(batch_groups=1)
    commit, times = one.buffer.store.commit, []

    def gone_once(*arguments):
        times.append(1)
        if len(times) == 1:
            run, lease, _ = arguments
            one.buffer.store.end_lease(run, lease)
            raise StatusError(grpc.StatusCode.ABORTED, "lease_id is not held any more")
        return commit(*arguments)

    one.buffer.store.commit = gone_once
    one.worker()
    (group,) = await one.groups(await one.batch())
    assert group.rollouts[0].attempt == 2


async def test_a_buffer_that_restarts_loses_and_doubles_nothing(stage, prompts):
    started = asyncio.Event()

    async def slow(request, seen):
        started.set()
        await asyncio.sleep(0.5)
        yield delta([5, 2], 0, STOP)

    one = await stage(slow, prompts[:2])
    store = FakeBuffer(source=prompts[:2])
    async with serve(store) as first:
        async with open_channel(first.address) as channel:
            one.stub = buffer_pb2_grpc.BufferServiceStub(channel)
            await one.open_run()
        one.worker(buffer=first.address)
        await started.wait()
    # Away while the groups are being generated; back under the same address with what it knew.
    await asyncio.sleep(1.0)
    async with serve(store, ServerOptions(address=first.address)), open_channel(first.address) as channel:
        await wait_serving(channel, 30.0)
        one.stub = buffer_pb2_grpc.BufferServiceStub(channel)
        assert len((await one.batch(30.0)).groups) == 2
        stats = await one.stats()
        assert stats.groups_committed_total == 2 and stats.leases_lapsed_total == 0
        assert len(one.engine.requests) == 4
        one.stop.set()


async def test_an_engine_that_restarts_is_asked_again_under_the_same_ids(stage, prompts):
    async def halting(request, seen):
        yield delta([10], 0)
        await asyncio.sleep(60)

    one = await stage(halting, prompts[:1])
    await one.open_run(batch_groups=1)
    first = ScriptedEngine(halting)
    async with serve(first) as at:
        one.worker(rollout=at.address)
        await until(lambda: first.running == 2)
    second = ScriptedEngine(answering([11, 2]))
    async with serve(second, ServerOptions(address=at.address)):
        (group,) = await one.groups(await one.batch(30.0))
        one.stop.set()
    assert {one.request_id for one in first.requests} == {one.request_id for one in second.requests}
    for rollout in group.rollouts:
        assert [ids_of(segment.token_ids) for segment in rollout.samples[0].segments[1:]] == [[11, 2]]
