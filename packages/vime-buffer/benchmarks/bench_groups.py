"""Groups per second through the whole buffer, against SQLite alone with the same bytes.

    python benchmarks/bench_groups.py [--steps 9] [--groups 32] [--rollouts 8] [--tokens 16] [--trace-layers 0]

A step is what a training step costs the buffer: lease the prompts, commit every group (as many at once as a worker would),
lease the batch, fetch every sample, ack, publish. The server is a process of its own and its CPU time is read from the kernel.
The limit is one SQLite transaction per group that inserts the group's serialised bytes with the same journal settings, in the
same run. Medians over steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from vime_proto.channel import open_channel, wait_serving
from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version

RUN = "bench"


def make_sample(name: str, tokens: int, layers: int, number: int) -> sample_pb2.Sample:
    prompt = max(1, tokens // 2)
    answer = tokens - prompt
    sample = sample_pb2.Sample(sample_id=name)
    sample.segments.add(role=sample_pb2.SEGMENT_ROLE_PROMPT, token_ids=to_tensor(np.arange(prompt, dtype=np.int32)))
    sample.segments.add(
        role=sample_pb2.SEGMENT_ROLE_MODEL,
        token_ids=to_tensor(np.arange(answer, dtype=np.int32)),
        trainable_all=True,
        generation=sample_pb2.Generation(
            logprobs=to_tensor(np.full(answer, -1, np.float32)),
            logprob_mode=sample_pb2.LOGPROB_MODE_PROCESSED,
            version=policy_version(RUN, 0, number),
            sampling=sample_pb2.SamplingParams(temperature=1, max_new_tokens=max(1, answer)),
            finish_reason=sample_pb2.FINISH_REASON_STOP,
        ),
    )
    if layers:
        payload = bytes((tokens - 1) * layers * 2)
        whole = common_pb2.IndexRange(start=0, stop=tokens - 1)
        header = routing_pb2.RoutingTraceHeader(
            experts=8,
            top_k=2,
            layer_ids=range(layers),
            rows=tokens - 1,
            dtype=common_pb2.DTYPE_UINT8,
            payload_length=len(payload),
        )
        header.spans.add(rows=whole, version=policy_version(RUN, 0, number))
        header.chunks.add(
            rows=whole,
            layers=common_pb2.IndexRange(start=0, stop=layers),
            stored=common_pb2.ByteRange(offset=0, length=len(payload)),
            raw_length=len(payload),
            checksum=checksum(payload),
            compression=routing_pb2.COMPRESSION_NONE,
        )
        sample.routing.CopyFrom(routing_pb2.RoutingTrace(header=header, inline=payload))
    return sample


def make_group(lease: pb.PromptLease, options: argparse.Namespace, number: int) -> sample_pb2.Group:
    group = sample_pb2.Group(group_id=lease.prompt.prompt_id, prompt=lease.prompt)
    for i in range(options.rollouts):
        name = f"{lease.prompt.prompt_id}-{i}"
        group.rollouts.add(
            rollout_id=name,
            attempt=lease.attempt,
            status=sample_pb2.ROLLOUT_STATUS_COMPLETED,
            reward=float(i % 2),
            rewards={"exact": float(i % 2)},
            samples=[make_sample(name, options.tokens, options.trace_layers, number)],
        )
    return group


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sqlite_seconds(path: str, blobs: list[bytes]) -> float:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=normal")
    connection.execute("create table if not exists payload (id integer primary key, data blob)")
    start = time.perf_counter()
    for blob in blobs:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("insert into payload (data) values (?)", (blob,))
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - start
    connection.close()
    return elapsed


async def drive(address: str, pid: int, options: argparse.Namespace, limit_path: str) -> dict[str, list[float]]:
    channel = open_channel(address)
    await wait_serving(channel, 30)
    stub = BufferServiceStub(channel)
    counter = iter(range(10**9))
    ids = lambda: {"request_id": str(next(counter)), "run_id": RUN}  # noqa: E731
    await stub.OpenRun(
        pb.OpenRunRequest(
            **ids(),
            batch_groups=options.groups,
            group_size=options.rollouts,
            max_staleness=0,
            publish_interval=1,
            lineage=common_pb2.Lineage(ordinal=0),
        )
    )
    prompts = [
        sample_pb2.Prompt(prompt_id=f"p{i}", text=f"{i}+1=", answer=str(i + 1))
        for i in range(options.groups * (options.steps + 1))
    ]
    await stub.PutPrompts(pb.PutPromptsRequest(**ids(), prompts=prompts))
    seen: dict[str, list[float]] = {"wall": [], "cpu": [], "commit": [], "fetch": [], "sqlite": [], "bytes": []}
    for step in range(options.steps + 1):
        version = policy_version(RUN, 0, step)
        await stub.PublishVersion(pb.PublishVersionRequest(request_id=str(next(counter)), version=version))
        # Built outside of the clock: a worker has its groups when it commits.
        start, cpu = time.perf_counter(), cpu_seconds(pid)
        granted = await stub.LeasePrompts(
            pb.LeasePromptsRequest(**ids(), holder="worker", incarnation="1", max_prompts=options.groups)
        )
        leased = time.perf_counter() - start
        groups = [make_group(lease, options, step) for lease in granted.leases]
        sending = time.perf_counter()
        await asyncio.gather(
            *(
                stub.CommitGroup(
                    pb.CommitGroupRequest(**ids(), lease_id=lease.lease_id, attempt=lease.attempt, group=group)
                )
                for lease, group in zip(granted.leases, groups, strict=True)
            )
        )
        committed = time.perf_counter()
        batch = await stub.LeaseBatch(pb.LeaseBatchRequest(**ids(), holder="trainer", incarnation="1"))
        fetching = time.perf_counter()
        names = [one.sample_id for group in batch.groups for rollout in group.rollouts for one in rollout.samples]
        request = pb.FetchSamplesRequest(run_id=RUN, samples=[pb.SampleSelection(sample_id=name) for name in names])
        received = [answer async for answer in stub.FetchSamples(request)]
        fetched = time.perf_counter()
        assert len(received) == options.groups * options.rollouts and all(one.status.code == 0 for one in received)
        await stub.AckBatch(pb.AckBatchRequest(**ids(), lease_id=batch.lease_id))
        wall = leased + time.perf_counter() - sending
        # The kernel counts CPU in ticks of 10 ms; a step is several.
        used = cpu_seconds(pid) - cpu
        blobs = [group.SerializeToString() for group in groups]
        limit = sqlite_seconds(limit_path, blobs)
        if step:  # the first step warms up
            for name, value in (
                ("wall", wall),
                ("cpu", used),
                ("commit", committed - sending),
                ("fetch", fetched - fetching),
                ("sqlite", limit),
                ("bytes", sum(map(len, blobs))),
            ):
                seen[name].append(value)
    await channel.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 9), ("groups", 32), ("rollouts", 8), ("tokens", 16), ("trace-layers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "vime_buffer", "serve", "--database", f"{folder}/buffer.db", "--exit-with-parent"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            address = server.stdout.readline().split()[-1]
            seen = asyncio.run(drive(address, server.pid, options, f"{folder}/limit.db"))
        finally:
            server.terminate()
            server.wait(10)
    median = {name: statistics.median(values) for name, values in seen.items()}
    machine = f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    print(
        f"{options.groups} groups x {options.rollouts} rollouts x {options.tokens} tokens, {options.trace_layers} layers traced"
    )
    print(f"machine             {machine}")
    print(f"bytes of a step     {median['bytes'] / 1e6:.3f} MB")
    print(f"step, wall          {median['wall']:.4f} s   {options.groups / median['wall']:.0f} groups/s")
    print(f"step, server CPU    {median['cpu']:.3f} s")
    print(f"commits             {median['commit']:.4f} s   {options.groups / median['commit']:.0f} groups/s")
    print(f"fetch               {median['fetch']:.4f} s   {median['bytes'] / median['fetch'] / 1e6:.1f} MB/s")
    print(f"SQLite alone        {median['sqlite']:.4f} s   {options.groups / median['sqlite']:.0f} commits/s")
    print(f"of that limit       {100 * median['sqlite'] / median['commit']:.1f} %")


if __name__ == "__main__":
    main()
