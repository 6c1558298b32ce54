"""Updates of fake engines that fail in every way."""

import asyncio

import grpc
import pytest
from fleet import Faulty, fleet_of, holds, send, weights

from vime_proto.engine_state import PAUSED, RECEIVING, SERVING, STALE
from vime_proto.fakes import FakeEngine
from vime_proto.version import policy_version
from vime_trainer.publish import Publisher, PublishError
from vime_trainer.publish._engine import EngineUpdate


@pytest.mark.parametrize("transport", ["shm", "file", "stream"])
@pytest.mark.parametrize("chunk_bytes", [1, 600, 1 << 20])
async def test_every_transport_brings_the_very_bytes(transport, chunk_bytes, tmp_path):
    engines = [FakeEngine(f"engine-{i}") for i in range(2)]
    changes = {"transport": transport, "chunk_bytes": chunk_bytes, "part_bytes": 100, "min_engines": 2}
    async with fleet_of(*engines, tmp_path=tmp_path, **changes) as publisher:
        for number in (1, 2, 3):
            report = await send(publisher, number, seed=number)
            assert report.bytes == sum(t.numel() * 4 for _, t in weights())
            assert report.chunks == {1: 5, 600: 3, 1 << 20: 1}[chunk_bytes]
            assert report.seconds > 0 and sorted(report.engines) == ["engine-0", "engine-1"]
            for engine in engines:
                holds(engine, number, number)
                assert engine.machine.state == SERVING
        assert publisher.latest.version.number == 3


async def test_only_the_newest_version_stays_and_close_frees_it(tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path) as publisher:
        await send(publisher, 1)
        await send(publisher, 2)
        assert [path.name for path in (tmp_path / "shm").iterdir()] == [publisher.latest.update_id]
    assert not (tmp_path / "shm").exists()


async def test_leftovers_of_a_killed_process_of_the_run_go(tmp_path):
    others = ["other-0-7-abc", "run-2-0-7-abc", "run-x-0-7-new"]
    for name in ("run-0-7-abc", "run-1-8-new", *others):
        (tmp_path / "shm" / name).mkdir(parents=True)
    async with fleet_of(FakeEngine(), tmp_path=tmp_path):
        assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == others


@pytest.mark.parametrize("fault", ["begin", "load", "commit"])
async def test_a_failing_engine_leaves_every_version_as_it_was(fault, tmp_path):
    good, bad = FakeEngine("good"), Faulty("bad", **{fault: [grpc.StatusCode.INTERNAL]})
    async with fleet_of(good, bad, tmp_path=tmp_path, min_engines=2) as publisher:
        with pytest.raises(PublishError, match="engine bad: INTERNAL: made to fail"):
            await send(publisher, 1)
        assert publisher.latest is None
        assert bad.machine.version is None or bad.machine.version.number == 0
        assert bad.machine.state in (SERVING, STALE)
        if fault != "commit":
            # The other one had loaded everything, but was not told to commit.
            assert good.machine.version is None or good.machine.version.number == 0
        report = await send(publisher, 1, seed=4)
        assert sorted(report.engines) == ["bad", "good"]
        holds(bad, 1, 4)
        holds(good, 1, 4)


async def test_training_goes_on_with_enough_engines(tmp_path):
    good, bad = FakeEngine("good"), Faulty("bad", load=[grpc.StatusCode.INTERNAL])
    async with fleet_of(good, bad, tmp_path=tmp_path) as publisher:
        report = await send(publisher, 1)
        assert report.engines == ["good"] and "made to fail" in report.failed["bad"]
        holds(good, 1, 1)
        assert bad.machine.state != RECEIVING


async def test_an_update_is_tried_again(tmp_path):
    engine = Faulty(load=[None, grpc.StatusCode.INTERNAL])
    async with fleet_of(engine, tmp_path=tmp_path, attempts=2) as publisher:
        assert (await send(publisher, 1)).engines == ["engine-0"]
        holds(engine, 1, 1)


@pytest.mark.parametrize("call", ["begin", "load", "commit"])
async def test_an_engine_that_is_away_for_a_moment_is_waited_for(call, tmp_path):
    engine = Faulty(**{call: [grpc.StatusCode.UNAVAILABLE] * 2})
    async with fleet_of(engine, tmp_path=tmp_path, retry_seconds=3) as publisher:
        assert (await send(publisher, 1)).engines == ["engine-0"]


async def test_an_engine_that_does_not_come_back_is_not_waited_for_again(tmp_path):
    gone = [grpc.StatusCode.UNAVAILABLE] * 1000
    engine = Faulty("gone", load=gone, abort=gone, resume=gone)
    async with fleet_of(FakeEngine("good"), engine, tmp_path=tmp_path) as publisher:
        report = await send(publisher, 1)
        assert report.engines == ["good"] and "UNAVAILABLE" in report.failed["gone"]
        assert engine.calls.count("load") > 1 and engine.calls.count("abort") == 1 and "resume" not in engine.calls


async def test_a_lost_answer_to_commit_is_a_commit(tmp_path):
    engine = Faulty(committed=[grpc.StatusCode.INTERNAL])
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        assert (await send(publisher, 1)).engines == ["engine-0"]
        holds(engine, 1, 1)


async def test_a_stuck_update_ends_in_bounded_time_and_the_next_one_starts(tmp_path):
    engine = Faulty(load=[30.0])
    async with fleet_of(engine, tmp_path=tmp_path, timeout_seconds=0.3) as publisher:
        started = asyncio.get_running_loop().time()
        with pytest.raises(PublishError, match="engine engine-0"):
            await send(publisher, 1)
        assert asyncio.get_running_loop().time() - started < 5
        assert engine.machine.state == SERVING  # nothing was loaded: it serves on
        assert engine.machine.version.number == 0
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        assert (await send(publisher, 1)).engines == ["engine-0"]


async def test_resume_and_abort_are_repeated(tmp_path):
    engine = Faulty(
        begin=[grpc.StatusCode.INTERNAL], abort=[grpc.StatusCode.INTERNAL], resume=[grpc.StatusCode.INTERNAL]
    )
    engine.machine.pause()
    async with fleet_of(engine, tmp_path=tmp_path, retry_seconds=3) as publisher:
        with pytest.raises(PublishError):
            await send(publisher, 1)
        assert engine.machine.state == SERVING
        assert engine.calls.count("abort") >= 2 and engine.calls.count("resume") == 2


async def test_a_paused_engine_serves_after_the_update(tmp_path):
    engine = FakeEngine()
    engine.machine.pause()
    assert engine.machine.state == PAUSED
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        await send(publisher, 1)
        assert engine.machine.state == SERVING


async def test_a_straggler_is_left_behind_and_can_catch_up(tmp_path):
    slow = Faulty("slow", load=[20.0])
    async with fleet_of(FakeEngine("fast"), slow, tmp_path=tmp_path, straggler_seconds=0.2) as publisher:
        report = await send(publisher, 1)
        assert report.engines == ["fast"] and "not ready" in report.failed["slow"]
        assert (await send(publisher, 2, seed=3)).failed == {}
        holds(slow, 2, 3)


async def test_too_few_engines_is_a_clear_error(tmp_path):
    async with fleet_of(FakeEngine("only"), tmp_path=tmp_path, min_engines=3, engines_timeout_seconds=0.2) as publisher:
        with pytest.raises(TimeoutError, match=r"3 engines needed .* the router lists as reachable: only"):
            await send(publisher, 1)
        assert publisher.latest is None


async def test_wrong_tensors_are_refused_before_a_byte_is_loaded(tmp_path):
    engine = FakeEngine()
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        renamed = [(name.replace("norm", "nrom"), tensor) for name, tensor in weights()]
        manifest, _ = publisher.spool(policy_version("run", 0, 1), renamed)
        with pytest.raises(PublishError, match="nrom"):
            await publisher.publish(manifest)
        assert engine.machine.state == SERVING and engine.machine.version.number == 0


async def test_an_engine_that_claims_the_version_is_updated_all_the_same(tmp_path):
    engine = FakeEngine()  # claims number 0, with the weights of seed 0
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        await send(publisher, 0, seed=5)
        holds(engine, 0, 5)


async def test_an_update_that_a_killed_trainer_left_open_is_ended(tmp_path):
    engine = Faulty(load=[None, 60.0])
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        manifest, _ = publisher.spool(policy_version("run", 0, 1), weights(1))
        killed = asyncio.create_task(publisher.publish(manifest))
        await engine.second_load.wait()
        # The next process begins while that update is still open.
        assert engine.machine.state == RECEIVING
        async with fleet_of(engine, tmp_path=tmp_path / "next", retry_seconds=3) as following:
            assert (await send(following, 1, seed=6)).engines == ["engine-0"]
            holds(engine, 1, 6)
        killed.cancel()
        await asyncio.wait([killed])
        assert engine.machine.state == SERVING


async def test_an_update_that_is_given_up_lets_go_of_its_engines(tmp_path):
    engine = Faulty(load=[None, 60.0])
    async with fleet_of(engine, tmp_path=tmp_path) as publisher:
        manifest, _ = publisher.spool(policy_version("run", 0, 1), weights(1))
        work = asyncio.create_task(publisher.publish(manifest))
        await engine.second_load.wait()
        work.cancel()
        await publisher.close()
        assert engine.machine.state == STALE and engine.machine.update_id == ""


# Engines that come late --------------------------------------------------------------------------------------------


class Counting(FakeEngine):
    """Counts updates that it really begins and commits, not the calls that ask for it."""

    def __init__(self):
        super().__init__("engine-0")
        self.begun, self.committed = [], []

    async def _begin(self, request):
        self.begun.append(request.request_id)
        return await super()._begin(request)

    async def _commit(self, request):
        self.committed.append(request.request_id)
        return await super()._commit(request)


async def test_the_same_update_of_two_coordinators_happens_once(tmp_path):
    engine = Counting()
    async with fleet_of(engine, tmp_path=tmp_path) as first:
        second = Publisher("run", first._fleet, first._settings)
        second.salt = first.salt
        await send(first, 1)
        assert (await send(second, 1)).engines == ["engine-0"]
        assert len(engine.begun) == len(engine.committed) == 1
        # Other weights are another update, and so is another lineage's.
        await send(second, 1, seed=5)
        holds(engine, 1, 5)
        second.salt = "other"
        await send(second, 1, seed=5)
        assert len(engine.committed) == len(set(engine.committed)) == 3
        await second.close()


async def test_a_coordinator_takes_up_what_another_began(tmp_path):
    engine = Counting()
    async with fleet_of(engine, tmp_path=tmp_path) as first:
        manifest, _ = first.spool(policy_version("run", 0, 1), weights())
        (entry,) = await first._fleet.at_least(1, 5)
        begun = EngineUpdate(
            entry.engine_id, first._stub(entry.address), manifest, first._transport, first.store, first._settings, 1
        )
        await begun.prepare()
        assert engine.machine.state == RECEIVING
        second = Publisher("run", first._fleet, first._settings)
        second.salt = first.salt
        await send(second, 1)
        holds(engine, 1, 1)
        assert len(engine.begun) == len(engine.committed) == 1
        await second.close()
