"""What the router adds to a call: latency, requests a second and CPU time, against direct calls to the same engine in one run.

    python benchmarks/bench_latency.py [--calls 2000] [--concurrency 256] [--tokens 4]

Engine, router and callers are processes of their own. The engine answers at once, so that its own time does not hide the
router's. The bare pass-through forwards messages in the same way and does nothing else: it is what any proxy on grpc.aio costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time

import grpc
import numpy as np

from vime_proto import metadata as keys
from vime_proto.channel import open_channel, wait_serving
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2
from vime_proto.server import ServerInfo, start_server
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version


class Instant(rollout_pb2_grpc.RolloutServiceServicer, rollout_pb2_grpc.EngineControlServiceServicer):
    """Answers each request with as many messages as its limit of new tokens says, at once."""

    async def Generate(self, request, context):
        for number in range(request.sampling.max_new_tokens):
            yield pb.GenerateResponse(
                request_id=request.request_id,
                token_ids=to_tensor(np.array([number], dtype=np.int32)),
                engine_id="engine",
                version=policy_version("bench", 0, 0),
            )

    async def GetStatus(self, request, context):
        version = policy_version("bench", 0, 0)
        return pb.GetStatusResponse(status=pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, version=version))


async def engine() -> None:
    """Serves the engine until killed."""
    servicer = Instant()
    services = [
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, "vime.rollout.v1.RolloutService"),
        (rollout_pb2_grpc.add_EngineControlServiceServicer_to_server, servicer, "vime.rollout.v1.EngineControlService"),
    ]
    server = await start_server(services, ServerInfo("bench", "engine"))
    await server.set_serving(True)
    print(f"listening on {server.address}", flush=True)
    await server.wait()


async def bare(address: str) -> None:
    """Serves a pass-through until killed."""
    method = open_channel(address).unary_stream("/vime.rollout.v1.RolloutService/Generate")

    async def generate(message: bytes, context) -> None:
        call = method(message)
        while (answer := await call.read()) is not grpc.aio.EOF:
            await context.write(answer)

    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    generic = grpc.method_handlers_generic_handler("vime.rollout.v1.RolloutService", handlers)
    server = await start_server([], ServerInfo("bench", "bare"), generic_handlers=[generic])
    await server.set_serving(True)
    print(f"listening on {server.address}", flush=True)
    await server.wait()


@contextlib.contextmanager
def process(*words: str):
    """A process and the address that it prints."""
    child = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield child, child.stdout.readline().strip().removeprefix("listening on ")
    finally:
        child.kill()
        child.wait()


def cpu_seconds(child: subprocess.Popen) -> float:
    """User and system time of a process so far (Linux)."""
    with open(f"/proc/{child.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Caller:
    """Calls one server."""

    def __init__(self, channel, name: str, tokens: int):
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._name, self._count = name, 0
        self._sampling = sample_pb2.SamplingParams(max_new_tokens=tokens)
        self._prompt = to_tensor(np.arange(256, dtype=np.int32))

    async def one(self) -> float:
        """Seconds of one call, from its start to its end."""
        self._count += 1
        request_id = f"{self._name}-{self._count}"
        request = pb.GenerateRequest(request_id=request_id, sampling=self._sampling, prompt_token_ids=self._prompt)
        start = time.perf_counter()
        async for _ in self._stub.Generate(request, metadata=((keys.REQUEST_ID, request_id),)):
            pass
        return time.perf_counter() - start

    async def many(self, calls: int, concurrency: int) -> float:
        """Seconds of ``calls`` calls, ``concurrency`` at a time."""
        left = iter(range(calls))

        async def work() -> None:
            for _ in left:
                await self.one()

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return time.perf_counter() - start


async def measure(options, direct_address: str, proxies: dict[str, tuple[subprocess.Popen, str]]) -> None:
    """Runs and prints."""
    async with contextlib.AsyncExitStack() as stack:
        callers = {}
        for name, address in {"direct": direct_address, **{name: one[1] for name, one in proxies.items()}}.items():
            channel = await stack.enter_async_context(open_channel(address))
            await wait_serving(channel, 10)
            callers[name] = Caller(channel, name, options.tokens)
            await callers[name].many(options.concurrency * 2, options.concurrency)
        # In turn, so that all see the same load of the host.
        times = [[await caller.one() for caller in callers.values()] for _ in range(options.calls // 4)]
        for name, column in zip(callers, zip(*times, strict=True), strict=True):
            added = statistics.median(one - row[0] for one, row in zip(column, times, strict=True))
            print(
                f"one at a time: {name:<7} {statistics.median(column) * 1e3:7.3f} ms, added {added * 1e3:.3f} ms (medians)"
            )
        rates, cpu = {name: [] for name in callers}, {name: [] for name in callers}
        for _ in range(options.repeats):
            for name, caller in callers.items():
                before = cpu_seconds(proxies[name][0]) if name in proxies else 0.0
                rates[name].append(options.calls / await caller.many(options.calls, options.concurrency))
                after = cpu_seconds(proxies[name][0]) if name in proxies else 0.0
                cpu[name].append((after - before) / options.calls)
        for name in callers:
            own = f", {statistics.median(cpu[name]) * 1e3:.3f} ms of CPU a call" if name in proxies else ""
            print(f"{options.concurrency} at a time: {name:<7} {statistics.median(rates[name]):6.0f} calls/s{own}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="messages of an answer")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine or options.bare:
        asyncio.run(engine() if options.engine else bare(options.bare))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.tokens} messages a call"
    )
    with contextlib.ExitStack() as stack:
        _, direct = stack.enter_context(process(__file__, "--engine"))
        words = ["-m", "vime_router", "serve", "--engines", f'[{{id="engine", address="{direct}"}}]']
        proxies = {
            "bare": stack.enter_context(process(__file__, "--bare", direct)),
            "routed": stack.enter_context(process(*words)),
        }
        asyncio.run(measure(options, direct, proxies))


if __name__ == "__main__":
    main()
