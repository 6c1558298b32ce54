"""The engine over a backend that misbehaves."""

import asyncio

import grpc
import models
import pytest

from vime_proto.errors import StatusError
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.version import policy_version
from vime_rollout.engine._engine import Engine
from vime_rollout.engine._model import describe
from vime_rollout.engine._settings import EngineSettings
from vime_rollout.engine._types import BackendDeadError, Output, Sampling


class Backend:
    """A backend under the test's control."""

    def __init__(self):
        self.alive = True
        self.sinks = {}
        self.aborted = []
        self.layout = rollout_pb2.EngineLayout()
        self.gpu_uuids, self.kernels = [], {}
        self.refusal = None

    @property
    def unfinished(self):
        return len(self.sinks)

    def submit(self, request_id, prompt, sampling, sink, priority=0):
        if self.refusal is not None:
            raise self.refusal
        self.sinks[request_id] = sink
        return asyncio.sleep(0, request_id)

    async def abort(self, internal_ids):
        for one in internal_ids:
            self.aborted.append(one)
            if one in self.sinks:
                self.sinks.pop(one)(Output(tokens=[], logprobs=[], finish="abort"))


@pytest.fixture
def engine(tmp_path):
    cfg = models.config()
    folder = models.save(tmp_path, cfg, models.weights(cfg, 1))
    engine = Engine(EngineSettings(model=str(folder)), describe(folder), Backend())
    engine.machine.started(policy_version("run", 0, 0))
    return engine


async def start(engine, name="r"):
    return await engine.generation(name, b"payload", [1, 2], Sampling(max_new_tokens=4))


async def test_nan_ends_the_request_in_the_backend_too(engine):
    generation = await start(engine)
    engine.backend.sinks["r"](Output(tokens=[3], logprobs=[float("nan")]))
    with pytest.raises(StatusError, match="nan"):
        _ = [part async for part in generation.parts()]
    await asyncio.sleep(0)
    assert engine.backend.aborted == ["r"]
    assert engine.registry.get("r") is None  # a repetition runs again


async def test_a_dead_backend_is_unavailable(engine):
    generation = await start(engine)
    engine.backend.sinks["r"](BackendDeadError("gone"))
    with pytest.raises(StatusError, match="UNAVAILABLE: gone"):
        _ = [part async for part in generation.parts()]
    engine.backend.refusal = BackendDeadError("vLLM's engine core has ended")
    late = await start(engine, "late")
    assert late.error.code is grpc.StatusCode.UNAVAILABLE


async def test_refusals_of_the_backend_name_the_request(engine):
    engine.backend.refusal = ValueError("top_k must be -1 or at least 1")
    generation = await start(engine, "odd")
    assert generation.error.code is grpc.StatusCode.INVALID_ARGUMENT and "'odd'" in generation.error.message


async def test_states_that_take_no_requests(engine):
    engine.machine.go_stale("its lineage is dead")
    generation = await start(engine)
    assert generation.error.code is grpc.StatusCode.UNAVAILABLE and "its lineage is dead" in generation.error.message


async def test_the_last_reader_that_leaves_ends_the_request(engine):
    generation = await start(engine)
    generation.readers = 2
    await engine.release(generation)
    assert not generation.done
    await engine.release(generation)
    assert generation.finish == "abort" and engine.backend.aborted == ["r"] and engine.registry.get("r") is None


async def test_a_request_that_waits_can_be_aborted(engine):
    engine.machine.pause()
    waiting = [asyncio.ensure_future(start(engine, name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    assert engine.status().waiting == 2
    assert await engine.end_requests([engine.registry.get("a")]) == ["a"]
    async with asyncio.timeout(30):
        assert (await waiting[0]).finish == "abort"
    assert not waiting[1].done()
    engine.machine.resume()
    engine.changed()
    async with asyncio.timeout(30):
        assert (await waiting[1]).internal_id == "b"
    assert engine.status().waiting == 0
