from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest
import worker_models as models

from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import open_channel, wait_serving
from vime_proto.common.v1 import common_pb2
from vime_proto.fakes import FakeBuffer, serve
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.version import policy_version
from vime_rollout.worker import Tokenizer, WorkerSettings, run_worker


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return models.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return Tokenizer(tokenizer_folder)


class Stage:
    """A worker between an in-memory buffer and a scripted engine."""

    def __init__(self, buffer, engine, settings, stub):
        self.buffer, self.engine, self.settings, self.stub = buffer, engine, settings, stub
        self.stop = asyncio.Event()

    async def open_run(
        self, group_size: int = 2, batch_groups: int = 2, epochs: int | None = 1, max_staleness: int = 0, **fields
    ):
        await self.stub.OpenRun(
            buffer_pb2.OpenRunRequest(
                request_id=uuid.uuid4().hex, run_id=models.RUN, batch_groups=batch_groups, group_size=group_size,
                max_staleness=max_staleness, lineage=common_pb2.Lineage(ordinal=0), epochs=epochs, publish_interval=1, **fields,
            )
        )  # fmt: skip
        await self.publish(0)

    async def publish(self, number: int):
        version = policy_version(models.RUN, 0, number)
        await self.stub.PublishVersion(buffer_pb2.PublishVersionRequest(request_id=uuid.uuid4().hex, version=version))

    def worker(self, **changes) -> asyncio.Task:
        settings = WorkerSettings(**{**self.settings, **changes})
        return asyncio.create_task(run_worker(settings, self.stop))

    async def batch(self, wait: float = 60.0) -> buffer_pb2.LeaseBatchResponse:
        async with asyncio.timeout(wait):
            while True:
                answer = await self.stub.LeaseBatch(
                    buffer_pb2.LeaseBatchRequest(
                        request_id=uuid.uuid4().hex,
                        run_id=models.RUN,
                        holder="trainer",
                        incarnation="1",
                        wait_seconds=1.0,
                    )
                )
                if answer.outcome != buffer_pb2.LEASE_OUTCOME_EMPTY:
                    return answer

    async def ack(self, batch) -> None:
        await self.stub.AckBatch(
            buffer_pb2.AckBatchRequest(request_id=uuid.uuid4().hex, run_id=models.RUN, lease_id=batch.lease_id)
        )

    async def stats(self):
        return await self.stub.GetStats(buffer_pb2.GetStatsRequest(run_id=models.RUN))

    async def groups(self, batch) -> list[pb.Group]:
        """The groups of a batch as they were committed."""
        rows = self.buffer.store.runs[models.RUN].prompts
        return [rows[one.group_id].group for one in batch.groups]

    async def close_run(self) -> None:
        await self.stub.CloseRun(
            buffer_pb2.CloseRunRequest(request_id=uuid.uuid4().hex, run_id=models.RUN, reason="finished")
        )


@pytest.fixture
async def stage(tokenizer_folder):
    """``stage(script, prompts, **settings)`` starts buffer and engine; everything ends with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script, prompts, *, info=None, evaluations=None, ttl: float = 30.0, **settings) -> Stage:
            buffer = FakeBuffer(source=prompts, evaluations=evaluations, lease_ttl_seconds=ttl)
            engine = models.ScriptedEngine(script, **(info or {}))
            at = await stack.enter_async_context(serve(buffer))
            engine_at = await stack.enter_async_context(serve(engine))
            channel = await stack.enter_async_context(open_channel(at.address))
            await wait_serving(channel, 60.0)
            values = {
                "run_id": models.RUN,
                "buffer": at.address,
                "rollout": engine_at.address,
                "tokenizer": str(tokenizer_folder),
                "lease_wait_seconds": 0.5,
                "connect_seconds": 60.0,
                "reward_workers": 1,
                "sampling": {"max_new_tokens": 16},
                **settings,
            }
            one = Stage(buffer, engine, values, buffer_pb2_grpc.BufferServiceStub(channel))
            stack.callback(one.stop.set)
            return one

        yield start


@pytest.fixture
def prompts():
    return [
        pb.Prompt(prompt_id=f"p{number}", text=f"<bos>{number}+1=", answer=str(number + 1), row=number)
        for number in range(4)
    ]
