"""CPU time of a worker for each rollout: short answers, an engine that answers at once, an in-memory buffer.

    python benchmarks/bench_worker.py [--groups 32] [--group-size 8] [--steps 8] [--tokens 4] [--messages 4]

The worker is a process of its own; its start is measured by a run without prompts and taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import open_channel
from vime_proto.common.v1 import common_pb2
from vime_proto.fakes import FakeBuffer, serve
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "worker"))
import worker_models

RUN = "benchmark"


class Engine(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, tokens: int, messages: int):
        ids, logprobs = np.full(tokens // messages, 20, np.int32), np.full(tokens // messages, -0.5, np.float32)
        version = policy_version(RUN, 0, 0)
        self.parts = [
            rollout_pb2.GenerateResponse(
                token_ids=to_tensor(ids), logprobs=to_tensor(logprobs), version=version, engine_id="e"
            )
            for _ in range(messages)
        ]
        self.parts[-1].finish_reason = sample_pb2.FINISH_REASON_STOP

    async def Generate(self, request, context):
        for part in self.parts:
            yield part

    async def GetModelInfo(self, request, context):
        return rollout_pb2.GetModelInfoResponse(model="fake", vocab_size=512, max_model_len=1 << 20)


async def run(prompts, arguments, folder: Path) -> tuple[float, float]:
    """CPU and wall seconds of one worker process that answers all prompts."""
    buffer, engine = FakeBuffer(source=prompts), Engine(arguments.tokens, arguments.messages)
    async with serve(buffer) as at, serve(engine) as engine_at, open_channel(at.address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        await stub.OpenRun(
            buffer_pb2.OpenRunRequest(
                request_id=uuid.uuid4().hex, run_id=RUN, batch_groups=max(1, len(prompts)), group_size=arguments.group_size,
                max_staleness=0, lineage=common_pb2.Lineage(ordinal=0), epochs=1, publish_interval=1,
            )
        )  # fmt: skip
        version = policy_version(RUN, 0, 0)
        await stub.PublishVersion(buffer_pb2.PublishVersionRequest(request_id="v", version=version))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vime_rollout.worker", "--run-id", RUN, "--buffer", at.address, "--rollout", engine_at.address,
            "--tokenizer", str(folder), "--max-groups-in-flight", str(arguments.groups), stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        while (await stub.GetStats(buffer_pb2.GetStatsRequest(run_id=RUN))).groups_ready < len(prompts):
            await asyncio.sleep(0.01)
            if process.returncode is not None:
                raise SystemExit(f"the worker ended with status {process.returncode}")
        wall = time.monotonic() - started
        await stub.CloseRun(buffer_pb2.CloseRunRequest(request_id="c", run_id=RUN))
        await process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in (
        ("groups", 32),
        ("group-size", 8),
        ("steps", 8),
        ("tokens", 4),
        ("messages", 4),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    count = arguments.groups * arguments.steps
    prompts = [
        sample_pb2.Prompt(prompt_id=f"p{n}", text=f"<bos>{n % 100:02d}+11=", answer=str(n % 100 + 11))
        for n in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder:
        worker_models.write_tokenizer(Path(folder))
        results = []
        for _ in range(arguments.repeats):
            idle, _ = asyncio.run(run([], arguments, Path(folder)))
            busy, wall = asyncio.run(run(prompts, arguments, Path(folder)))
            results.append((busy - idle, wall))
    rollouts = count * arguments.group_size
    best = min(cpu for cpu, _ in results)
    print(
        json.dumps(
            {
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "rollouts": rollouts,
                "tokens": arguments.tokens,
                "messages": arguments.messages,
                "worker_cpu_ms_per_rollout": [round(cpu / rollouts * 1e3, 3) for cpu, _ in results],
                "best_ms": round(best / rollouts * 1e3, 3),
                "wall_seconds": [round(wall, 2) for _, wall in results],
            }
        )
    )


if __name__ == "__main__":
    main()
