"""Weight publication: chunks, retention, and updates of fake engines that fail in every way."""

import asyncio
import contextlib
import math

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.channel import open_channel
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.engine_state import PAUSED, RECEIVING, SERVING, STALE
from vime_proto.errors import StatusError
from vime_proto.fakes import FakeEngine, FakeRouter, serve, toy_weights
from vime_proto.router.v1 import router_pb2
from vime_proto.server import ServerOptions
from vime_proto.validate import validate_manifest
from vime_proto.version import policy_version
from vime_proto.weights.v1 import weights_pb2, weights_pb2_grpc
from vime_trainer import publish
from vime_trainer.publish import (
    DirectoryStore,
    Fleet,
    MemoryStore,
    Publisher,
    PublishError,
    Quorum,
    Retention,
    WeightsSettings,
    chunked,
    spool,
)
from vime_trainer.service import RunStatus, serve_trainer


def test_public_names():
    assert sorted(publish.__all__) == [
        "ChunkStore",
        "DirectoryStore",
        "Fleet",
        "MemoryStore",
        "PublishError",
        "PublishReport",
        "Publisher",
        "Quorum",
        "Retention",
        "WeightsSettings",
        "chunked",
        "spool",
    ]


def weights(seed: int = 1):
    return [(name, torch.from_numpy(array)) for name, (array, _) in toy_weights(seed).items()]


def moe(layers: int, experts: int, size: int = 4):
    yield "model.embed_tokens.weight", torch.zeros(size)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", torch.zeros(size)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", torch.zeros(size)
        yield f"{prefix}.input_layernorm.weight", torch.zeros(size)
    yield "lm_head.weight", torch.zeros(size)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 1200))
def test_experts_of_a_layer_are_never_separated(layers, experts, chunk_bytes):
    chunks = list(chunked(moe(layers, experts), chunk_bytes))
    names = [name for chunk in chunks for name, _ in chunk]
    assert sorted(names) == sorted(name for name, _ in moe(layers, experts))
    for layer in range(layers):
        holding = [
            i for i, chunk in enumerate(chunks) if any(f"layers.{layer}.mlp.experts" in name for name, _ in chunk)
        ]
        assert len(holding) == 1
    for chunk in chunks:
        size = sum(4 * tensor.numel() for _, tensor in chunk)
        only_experts = all(".experts." in name for name, _ in chunk)
        assert size <= chunk_bytes or len(chunk) == 1 or only_experts


def test_a_layer_that_fits_stays_whole():
    chunks = list(chunked(moe(2, 2), 8 * 16))
    assert [chunk[0][0] for chunk in chunks] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_bytes_and_dtype_of_a_tensor_travel_as_they_are(dtype):
    store = MemoryStore()
    tensor = torch.arange(6).reshape(2, 3).to(dtype).T
    manifest = spool("u", policy_version("run", 0, 1), [("w", tensor), ("s", torch.tensor(1.0))], 1000, store)
    validate_manifest(manifest)
    data = b"".join(part for _, part in store.read("u", "rank-0", 0, 5))
    length = 6 * tensor.element_size()
    back = torch.frombuffer(bytearray(data[:length]), dtype=dtype).reshape(3, 2)
    assert torch.equal(back, tensor)
    assert list(manifest.tensors[0].shape) == [3, 2] and list(manifest.tensors[1].shape) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_sent(bad, tmp_path):
    store = DirectoryStore(tmp_path / "root")
    tensors = [("a", torch.zeros(4)), ("b.weight", torch.tensor([0.0, bad]))]
    with pytest.raises(ValueError, match=r"'b\.weight' holds a value that is not finite"):
        spool("u", policy_version("run", 0, 1), tensors, 8, store)
    assert not (tmp_path / "root" / "u").exists()


def test_a_name_twice_or_an_odd_type_is_refused():
    version = policy_version("run", 0, 1)
    with pytest.raises(ValueError, match="'a' is repeated"):
        spool("u", version, [("a", torch.zeros(1)), ("a", torch.zeros(1))], 100, MemoryStore())
    with pytest.raises(ValueError, match=r"weight 'c': element type torch\.complex64"):
        spool("u", version, [("c", torch.zeros(1, dtype=torch.complex64))], 100, MemoryStore())


def test_retention_keeps_what_somebody_needs():
    kept = Retention()
    for name, engines in (("one", ["a", "b"]), ("two", ["a"]), ("three", [])):
        kept.add(name)
        kept.sent(name, engines)
        kept.published(name)
        if name == "one":
            kept.done("one", "a")
    assert kept.take_removable() == []  # one: b; two: a; three: the newest
    kept.done("two", "a")
    kept.opened("two")
    assert kept.take_removable() == []
    kept.closed("two")
    assert kept.take_removable() == ["two"]
    kept.done("one", "b")
    kept.done("one", "b")
    assert kept.take_removable() == ["one"]
    assert kept.take_removable() == [] and kept.newest == "three"


@pytest.mark.parametrize(("need", "events", "expected"), [
    (2, "rr", True), (2, "rf", False), (1, "fr", True), (1, "ff", False), (0, "", True), (3, "", False),
])  # fmt: skip
async def test_quorum(need, events, expected):
    quorum = Quorum(need, 2)
    waiting = []
    for event in events:
        if event == "r":
            waiting.append(asyncio.create_task(quorum.ready()))
        else:
            quorum.failed()
        await asyncio.sleep(0)
    assert [await one for one in waiting] == [expected] * len(waiting)
    assert quorum._decision.result() is expected


# With engines ----------------------------------------------------------------------------------------------------


class Faulty(FakeEngine):
    """Fails calls as told: faults[name] holds what each call of it does in turn (an error, or seconds to wait)."""

    def __init__(self, engine_id="engine-0", **faults):
        super().__init__(engine_id)
        self.faults = {name: list(what) for name, what in faults.items()}
        self.calls = []
        self.second_load = asyncio.Event()

    async def _maybe(self, name):
        self.calls.append(name)
        if self.calls.count("load") == 2:
            self.second_load.set()
        left = self.faults.get(name)
        what = left.pop(0) if left else None
        if isinstance(what, grpc.StatusCode):
            raise StatusError(what, "made to fail")
        if isinstance(what, int | float):
            await asyncio.sleep(what)

    async def BeginUpdate(self, request, context):
        await self._maybe("begin")
        return await super().BeginUpdate(request, context)

    async def LoadChunks(self, request, context):
        await self._maybe("load")
        return await super().LoadChunks(request, context)

    async def CommitUpdate(self, request, context):
        await self._maybe("commit")
        answer = await super().CommitUpdate(request, context)
        await self._maybe("committed")
        return answer

    async def AbortUpdate(self, request, context):
        await self._maybe("abort")
        return await super().AbortUpdate(request, context)

    async def Resume(self, request, context):
        await self._maybe("resume")
        return await super().Resume(request, context)


@contextlib.asynccontextmanager
async def fleet_of(*engines, tmp_path, **changes):
    """A publisher in front of a router that lists these engines."""
    base = {"transport": "shm", "root": tmp_path / "shm", "chunk_bytes": 600, "retry_seconds": 0.5, "attempts": 1}
    settings = WeightsSettings(**{**base, **changes})
    async with contextlib.AsyncExitStack() as stack:
        router = FakeRouter()
        served = await stack.enter_async_context(serve(router))
        for engine in engines:
            address = (await stack.enter_async_context(serve(engine))).address
            await register(router, engine.engine_id, address)
        channel = await stack.enter_async_context(open_channel(served.address))
        fleet = Fleet(channel, poll_seconds=0.02)
        publisher = Publisher("run", fleet, settings)
        stack.push_async_callback(publisher.close)
        yield publisher


async def register(router, engine_id, address):
    request = router_pb2.RegisterEngineRequest(request_id=engine_id, engine_id=engine_id, address=address)
    await router.RegisterEngine(request, None)
    await asyncio.sleep(0.1)


async def send(publisher, number, seed=1):
    manifest, seconds = publisher.spool(policy_version("run", 0, number), weights(seed))
    return await publisher.publish(manifest, seconds)


def holds(engine, number, seed):
    version = engine.machine.version
    assert (version.lineage, version.number) == (0, number)
    for name, tensor in weights(seed):
        assert (engine.model.tensors[name] == tensor.numpy()).all(), name


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
    for name in ("run-0-7-abc", "other-0-7-abc"):
        (tmp_path / "shm" / name).mkdir(parents=True)
    async with fleet_of(FakeEngine(), tmp_path=tmp_path):
        assert [path.name for path in (tmp_path / "shm").iterdir()] == ["other-0-7-abc"]


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


@contextlib.asynccontextmanager
async def weight_service(publisher):
    server = await serve_trainer("run", RunStatus(), publisher, ServerOptions())
    publisher.endpoint = server.address
    async with open_channel(server.address) as channel:
        yield weights_pb2_grpc.WeightServiceStub(channel)
    await server.stop(0)


@pytest.mark.parametrize("transport", ["shm", "stream"])
async def test_a_late_engine_fetches_the_newest_version(transport, tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path, transport=transport) as publisher:
        async with weight_service(publisher) as stub:
            request = weights_pb2.GetLatestManifestRequest(run_id="run")
            assert not (await stub.GetLatestManifest(request)).HasField("manifest")
            await send(publisher, 1, seed=2)
            manifest = (await stub.GetLatestManifest(request)).manifest
            assert manifest.sources[0].endpoint == publisher.endpoint
            data = {}
            fetch = weights_pb2.FetchTensorsRequest(update_id=manifest.update_id, source_id="rank-0")
            async for part in stub.FetchTensors(fetch):
                assert part.offset == len(data.get(part.chunk, b""))
                data[part.chunk] = data.get(part.chunk, b"") + part.data
            stream = b"".join(data[i] for i in sorted(data))
            for spec, (name, tensor) in zip(manifest.tensors, weights(2), strict=True):
                piece = spec.pieces[0].bytes
                assert spec.name == name
                assert stream[piece.offset : piece.offset + piece.length] == tensor.numpy().tobytes()
            one = weights_pb2.FetchTensorsRequest(update_id=manifest.update_id, source_id="rank-0", chunks=[1])
            assert b"".join([p.data async for p in stub.FetchTensors(one)]) == data[1]
            ack = weights_pb2.AckAppliedRequest(request_id="1", update_id=manifest.update_id, engine_id="late")
            await stub.AckApplied(ack)
            await stub.AckApplied(ack)


async def test_the_bytes_of_a_version_stay_while_somebody_reads_them(tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path) as publisher:
        await send(publisher, 1)
        first = publisher.latest.update_id
        publisher.reader_opened(first)
        await send(publisher, 2)
        assert (tmp_path / "shm" / first).exists()
        publisher.reader_closed(first)
        assert not (tmp_path / "shm" / first).exists()


async def test_manifests_are_watched_and_unknown_ones_are_refused(tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path) as publisher, weight_service(publisher) as stub:
        watch = stub.WatchManifests(weights_pb2.WatchManifestsRequest(run_id="run"))
        await send(publisher, 1)
        assert (await watch.read()).manifest.version.number == 1
        await send(publisher, 2)
        assert (await watch.read()).manifest.version.number == 2
        watch.cancel()
        for method, request, code in (
            (stub.GetLatestManifest, weights_pb2.GetLatestManifestRequest(run_id="x"), grpc.StatusCode.NOT_FOUND),
            (stub.AckApplied, weights_pb2.AckAppliedRequest(request_id="2"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as error:
                await method(request)
            assert error.value.code() is code
        for fetch, code in (
            ({"update_id": "gone", "source_id": "rank-0"}, grpc.StatusCode.NOT_FOUND),
            ({"update_id": publisher.latest.update_id, "source_id": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"update_id": publisher.latest.update_id, "source_id": "rank-0", "chunks": [9]}, grpc.StatusCode.INVALID_ARGUMENT),
        ):  # fmt: skip
            with pytest.raises(grpc.RpcError) as error:
                async for _ in stub.FetchTensors(weights_pb2.FetchTensorsRequest(**fetch)):
                    pass
            assert error.value.code() is code


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="root: needed by transport file"):
        WeightsSettings(transport="file")
    with pytest.raises(ValueError, match="must be an absolute path"):
        WeightsSettings(root="weights")
    assert common.DTYPE_BFLOAT16 == publish._chunks.DTYPES[torch.bfloat16]
