"""A late engine fetches the newest weights from the trainer."""

import asyncio
from pathlib import Path

import grpc
import models
import pytest
from pushing import manifest_of
from test_engine_faults import Backend

from vime_proto import fakes
from vime_proto.engine_state import SERVING, STALE
from vime_proto.errors import ContractError, StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.server import ServerInfo, ServerOptions, start_server
from vime_proto.version import policy_version
from vime_proto.weights.v1 import weights_pb2 as weights
from vime_proto.weights.v1 import weights_pb2_grpc
from vime_rollout.engine._catch_up import CatchUp
from vime_rollout.engine._control_service import ControlServicer
from vime_rollout.engine._engine import Engine
from vime_rollout.engine._model import describe
from vime_rollout.engine._settings import EngineSettings

CONFIG = models.config()
TENSORS = models.weights(CONFIG, 5)


class Loading(Backend):
    """A backend that takes weights, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.loaded = b""

    async def pause(self, keep):
        for sink in list(self.sinks):
            await self.abort([sink])

    async def resume(self):
        return None

    async def begin_update(self):
        self.loaded = b""

    async def load_chunk(self, path, fills, names):
        self.loaded += Path(path).read_bytes()

    async def end_update(self, clear_cache=False):
        return None


class Trainer(weights_pb2_grpc.WeightServiceServicer):
    """The trainer's WeightService over manifests that a test publishes."""

    def __init__(self, run_id="run"):
        self.run_id, self.latest, self.parts, self.acks = run_id, None, {}, []
        self.damage = 0  # fetches that get wrong bytes in their last chunk
        self.deaf = False  # whether it refuses to hear of what was applied
        self.fetches = 0
        self.changed = asyncio.Condition()

    async def publish(self, number, chunks=3, lineage=0):
        manifest, parts = manifest_of(TENSORS, policy_version(self.run_id, lineage, number), chunks)
        async with self.changed:
            self.latest, self.parts = manifest, parts
            self.changed.notify_all()
        return manifest, parts

    async def GetLatestManifest(self, request, context):
        if request.run_id != self.run_id:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"run {request.run_id!r} is not trained here")
        return weights.GetLatestManifestResponse(manifest=self.latest)

    async def WatchManifests(self, request, context):
        seen = None
        while True:
            async with self.changed:
                while self.latest is seen:
                    await self.changed.wait()
                seen = self.latest
            yield weights.WatchManifestsResponse(manifest=seen)

    async def FetchTensors(self, request, context):
        self.fetches += 1
        damaged, self.damage = self.damage > 0, max(0, self.damage - 1)
        chunks = self.parts[request.source_id]
        for index, data in enumerate(chunks):
            if damaged and index == len(chunks) - 1:
                data = bytes(len(data))
            half = len(data) // 2
            yield weights.FetchTensorsResponse(chunk=index, offset=0, data=data[:half])
            yield weights.FetchTensorsResponse(chunk=index, offset=half, data=data[half:])

    async def AckApplied(self, request, context):
        if self.deaf:
            raise StatusError(grpc.StatusCode.NOT_FOUND, "no such update")
        self.acks.append((request.update_id, request.engine_id))
        return weights.AckAppliedResponse()


async def serve(trainer, address="127.0.0.1:0", **more):
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    info = ServerInfo(package="test", role="trainer", run_id=trainer.run_id)
    return await start_server([(add, trainer, "vime.weights.v1.WeightService")], info, ServerOptions(address=address, **more))


@pytest.fixture
async def trainer():
    servicer = Trainer()
    server = await serve(servicer)
    servicer.address = server.address
    yield servicer
    await server.stop(0)


@pytest.fixture
def engine(tmp_path, trainer):
    return make(tmp_path, trainer.address)


def make(folder, address, **more):
    models.save(folder, CONFIG, TENSORS)
    settings = EngineSettings(model=str(folder), run_id="run", weights=address, **more)
    engine = Engine(settings, describe(folder), Loading())
    engine.machine.started(policy_version("run", 0, 0))
    engine.control = ControlServicer(engine)
    engine.catch_up = CatchUp(engine, engine.control)
    return engine


def held(engine):
    version = engine.machine.version
    return None if version is None else (version.lineage, version.number)


async def until(condition, seconds=60.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_it_has_the_newest_weights_before_it_serves(engine, trainer):
    manifest, parts = await trainer.publish(4)
    await engine.catch_up.first()
    assert held(engine) == (0, 4) and engine.machine.state == SERVING
    assert engine.backend.loaded == b"".join(parts["rank0"])
    assert trainer.acks == [(manifest.update_id, "engine-0")]
    # The same update pushed afterwards is the one that it has.
    begin = pb.BeginUpdateRequest(request_id="push", manifest=manifest, transport_id="catch-up")
    answer = await engine.control.BeginUpdate(begin, None)
    assert answer.status.state == SERVING
    await engine.catch_up.stop()


async def test_before_the_first_publication_it_serves_what_the_folder_holds(engine, trainer):
    await engine.catch_up.first()
    assert held(engine) == (0, 0) and trainer.fetches == 0
    await engine.catch_up.stop()


async def test_what_passes_it_by_is_fetched_later(engine, trainer):
    await engine.catch_up.first()
    engine.catch_up.start()
    await trainer.publish(1)
    await until(lambda: held(engine) == (0, 1))
    # A restore: another lineage, and fewer batches than the engine holds.
    await trainer.publish(0, lineage=1)
    await until(lambda: held(engine) == (1, 0))
    # What was pushed is not fetched again, nor is anything older.
    fetches = trainer.fetches
    engine.machine.pause()
    engine.machine.begin_update("pushed", full=True, busy=0, return_to=SERVING)
    await trainer.publish(1, lineage=1)
    await asyncio.sleep(0.1)
    assert trainer.fetches == fetches, "an engine that receives weights is left alone"
    engine.machine.commit_update("pushed", policy_version("run", 1, 1))
    engine.changed()
    await asyncio.sleep(0.1)
    assert trainer.fetches == fetches and held(engine) == (1, 1)
    await engine.catch_up.stop()


async def test_wrong_bytes_leave_it_stale_until_the_next_fetch(engine, trainer):
    await trainer.publish(2)
    trainer.damage = 1
    await engine.catch_up.first()
    assert engine.machine.state == STALE and held(engine) is None and not trainer.acks
    engine.catch_up.start()
    await until(lambda: trainer.acks)
    assert held(engine) == (0, 2)
    assert engine.machine.state == SERVING
    await engine.catch_up.stop()


async def test_weights_that_the_trainer_does_not_hear_of_are_held_all_the_same(engine, trainer, caplog):
    trainer.deaf = True
    await trainer.publish(2)
    await engine.catch_up.first()
    assert held(engine) == (0, 2) and engine.machine.state == SERVING
    assert "does not know that engine-0 holds the weights" in caplog.text and "not caught up" not in caplog.text
    await engine.catch_up.stop()


async def test_a_backend_that_fails_does_not_end_the_following(engine, trainer, caplog):
    pause, failures = engine.backend.pause, [RuntimeError("the workers are busy")]

    async def failing(keep):
        if failures:
            raise failures.pop()
        await pause(keep)

    engine.backend.pause = failing
    engine.catch_up.start()
    await trainer.publish(1)
    await until(lambda: not failures)
    await engine.control.Resume(pb.ResumeRequest(request_id="resume"), None)
    await until(lambda: held(engine) == (0, 1))
    assert "the workers are busy" in caplog.text
    await engine.catch_up.stop()


async def test_a_trainer_that_comes_late_is_found(tmp_path, trainer):
    spare = await serve(Trainer())
    address = spare.address
    await spare.stop(0)
    engine = make(tmp_path, address, weights_seconds=0.2)
    await engine.catch_up.first()
    assert held(engine) == (0, 0)
    engine.catch_up.start()
    server = await serve(trainer, address)
    await trainer.publish(3)
    await until(lambda: held(engine) == (0, 3), 30)
    await engine.catch_up.stop()
    await server.stop(0)


async def test_a_wrong_address_is_an_error_that_names_it(tmp_path):
    other = Trainer("another")
    server = await serve(other)
    engine = make(tmp_path, server.address)
    with pytest.raises(ContractError, match="weights: .*'run' is not trained here"):
        await engine.catch_up.first()
    await engine.catch_up.stop()
    await server.stop(0)
    async with fakes.serve(fakes.FakeRouter()) as router:
        engine = make(tmp_path, router.address)
        with pytest.raises(ContractError, match=f"weights: {router.address}: UNIMPLEMENTED"):
            await engine.catch_up.first()
        await engine.catch_up.stop()


async def test_a_trainer_with_tls_and_a_token_is_read_by_who_trusts_it(tmp_path, certificate):
    trainer = Trainer()
    cert, key = certificate
    (tmp_path / "token").write_text("secret\n")
    server = await serve(trainer, tls_certificate=cert, tls_key=key, token="secret")
    await trainer.publish(2)
    plain = make(tmp_path / "plain", server.address, weights_seconds=1)
    await plain.catch_up.first()
    assert held(plain) == (0, 0)
    await plain.catch_up.stop()
    trusting = {"weights_tls_ca": cert, "weights_token_file": str(tmp_path / "token")}
    engine = make(tmp_path / "model", server.address, **trusting)
    await engine.catch_up.first()
    assert held(engine) == (0, 2) and trainer.acks
    await engine.catch_up.stop()
    await server.stop(0)
