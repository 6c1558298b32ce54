"""A publisher in front of fake engines that fail as they are told."""

import asyncio
import contextlib

import grpc
import torch

from vime_proto.channel import open_channel
from vime_proto.errors import StatusError
from vime_proto.fakes import FakeEngine, FakeRouter, serve, toy_weights
from vime_proto.router.v1 import router_pb2
from vime_proto.version import policy_version
from vime_trainer.publish import Fleet, Publisher, WeightsSettings


def weights(seed: int = 1):
    return [(name, torch.from_numpy(array)) for name, (array, _) in toy_weights(seed).items()]


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
