"""Buffer, router, engines and a worker on loopback, in a thread of their own, around a trainer under test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid

from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import call, open_channel
from vime_proto.fakes import FakeBuffer, FakeEngine, FakeRouter, build, serve
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_numpy
from vime_trainer.rl import RlSettings

RUN = "run"


def code_of(i: int) -> tuple[int, int, int]:
    """The tokens of prompt i: no two prompts share them."""
    return (2, 3 + i // 28, 3 + i % 28)


def prompts(count: int, start: int = 0) -> list[sample_pb2.Prompt]:
    return [build.prompt(f"p{i}", code_of(i)) for i in range(start, start + count)]


class Stages:
    """Everything but the trainer.

    Args:
        buffer: the servicer; a FakeBuffer unless given.
        engines: how many, or the engine servicers.
        rows: prompts of the source.
        workers: whether a worker answers prompts.
    """

    def __init__(self, buffer=None, engines=1, rows: int = 24, workers: bool = True, router=None, **buffer_options):
        buffer_options.setdefault("evaluations", {"held_out": prompts(5, 500)})
        self.buffer = buffer or FakeBuffer(source=prompts(rows), **buffer_options)
        made = engines if isinstance(engines, list) else [FakeEngine(f"engine-{i}") for i in range(engines)]
        self.engines = made
        self.router = router or FakeRouter()
        self.workers = workers
        self.addresses: dict[str, str] = {}
        self.failures: list[BaseException] = []
        self.answered = 0
        self._ready, self._end = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Stages:
        self._thread.start()
        assert self._ready.wait(120), "stages did not start"
        return self

    def __exit__(self, *exc) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        assert not self.failures, self.failures

    def call(self, work):
        """Runs a coroutine on the stages' loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def _main(self) -> None:
        self.loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            buffer = await stack.enter_async_context(serve(self.buffer))
            router = await stack.enter_async_context(serve(self.router))
            self.addresses = {"buffer": buffer.address, "router": router.address}
            for engine in self.engines:
                served = await stack.enter_async_context(serve(engine))
                await self.router.RegisterEngine(
                    router_pb2.RegisterEngineRequest(
                        request_id=uuid.uuid4().hex, engine_id=engine.engine_id, address=served.address
                    ),
                    None,
                )
            await asyncio.sleep(0.1)
            worker = asyncio.create_task(self._work()) if self.workers else None
            self._ready.set()
            await self._end.wait()
            if worker is not None:
                worker.cancel()
                await asyncio.wait([worker])
                if not worker.cancelled() and worker.exception() is not None:
                    self.failures.append(worker.exception())

    async def _work(self) -> None:
        async with (
            open_channel(self.addresses["buffer"]) as to_buffer,
            open_channel(self.addresses["router"]) as to_router,
        ):
            buffer = buffer_pb2_grpc.BufferServiceStub(to_buffer)
            rollout = rollout_pb2_grpc.RolloutServiceStub(to_router)
            while True:
                request = buffer_pb2.LeasePromptsRequest(
                    request_id=uuid.uuid4().hex,
                    run_id=RUN,
                    holder="worker",
                    incarnation="1",
                    max_prompts=4,
                    wait_seconds=0.2,
                )
                try:
                    leased = await call(buffer.LeasePrompts, request)
                except Exception:
                    # No run yet, or its lineage waits for a rewind.
                    await asyncio.sleep(0.02)
                    continue
                if leased.outcome == buffer_pb2.LEASE_OUTCOME_END_OF_DATA:
                    await asyncio.sleep(0.02)
                    continue
                await asyncio.gather(*(self._answer(buffer, rollout, lease) for lease in leased.leases))

    async def _answer(self, buffer, rollout, lease) -> None:
        try:
            group = sample_pb2.Group(group_id=lease.prompt.prompt_id, prompt=lease.prompt)
            for i in range(lease.group_size):
                group.rollouts.append(await self._roll(rollout, lease, i))
            commit = buffer_pb2.CommitGroupRequest(
                request_id=uuid.uuid4().hex, run_id=RUN, lease_id=lease.lease_id, attempt=lease.attempt, group=group
            )
            await call(buffer.CommitGroup, commit)
            self.answered += 1
        except Exception as error:
            release = buffer_pb2.ReleaseLeaseRequest(
                request_id=uuid.uuid4().hex, run_id=RUN, lease_id=lease.lease_id, reason=str(error)
            )
            with contextlib.suppress(Exception):
                await call(buffer.ReleaseLease, release)

    async def _roll(self, rollout, lease, i: int) -> sample_pb2.Rollout:
        name = f"{lease.prompt.prompt_id}/{lease.attempt}/{i}/{uuid.uuid4().hex[:6]}"
        sampling = sample_pb2.SamplingParams(temperature=1.0, max_new_tokens=4, seed=hash(name) % 2**32)
        start = to_numpy(lease.prompt.token_ids)
        request = rollout_pb2.GenerateRequest(
            request_id=name, prompt_token_ids=lease.prompt.token_ids, sampling=sampling,
            minimum_version=lease.minimum_version,
        )  # fmt: skip
        tokens, logprobs, last = [], [], None
        async for part in rollout.Generate(request, timeout=20):
            if part.HasField("token_ids"):
                tokens += to_numpy(part.token_ids).tolist()
                logprobs += to_numpy(part.logprobs).tolist()
            last = part
        if last.finish_reason == sample_pb2.FINISH_REASON_ABORT:
            raise RuntimeError("aborted by a weight update")
        segment = build.model_segment(last.version, tokens, logprobs)
        segment.generation.sampling.CopyFrom(sampling)
        # Every group has variance, so every step has a gradient.
        reward = float(i % 2)
        return sample_pb2.Rollout(
            rollout_id=name,
            attempt=lease.attempt,
            status=sample_pb2.ROLLOUT_STATUS_COMPLETED,
            rewards={"odd": reward},
            reward=reward,
            samples=[
                sample_pb2.Sample(sample_id=f"{name}/s", segments=[build.prompt_segment(start.tolist()), segment])
            ],
        )


def settings_for(stages: Stages, output, **changes) -> RlSettings:
    """A small on-policy run against these stages."""
    base = {
        "run_id": RUN,
        "model": "unused",
        "output": output,
        "buffer": stages.addresses["buffer"],
        "router": stages.addresses["router"],
        "max_steps": 3,
        "batch": {"groups": 4, "group_size": 2, "token_budget": 20},
        "weights": {"transport": "shm", "root": str(output / "weights"), "chunk_bytes": 600, "retry_seconds": 0.5},
        "checkpoint": {"interval": 1},
        "metrics": {"tensorboard": False},
        "buffer_retry_seconds": 5.0,
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return RlSettings(**base)
