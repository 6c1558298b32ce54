"""What route capture costs an engine: off, as vime-rollout does it, and as vLLM alone does it, in alternating order.

    python benchmarks/bench_capture.py [--layers 48 --experts 16 --top-k 8] [--requests 128 --tokens 48 --rounds 5]

Three engines with one random MoE run on CPU; a round asks one of them for all requests at once. Prints medians: tokens a second,
and the CPU time of a step (one token for each request) in front end and core (without the worker that runs the model), which moves
less with whatever else a host does. The host of a GPU runs the same Python for a step: only ids a token (layers times top-k) and
requests count, so the model can be narrow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import sys
import time
import uuid
from pathlib import Path

import numpy as np

from vime_proto.channel import open_channel
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
import models
from conftest import running

ENGINES = {
    "off": (),
    "on": ("--route-capture",),
    # Named, vLLM's own scheduler takes the place of vime-rollout's.
    "vLLM's": ("--route-capture", "--vllm.scheduler_cls", "vllm.v1.core.sched.scheduler.Scheduler"),
}
TICKS = os.sysconf("SC_CLK_TCK")


def model(options: argparse.Namespace) -> dict:
    """A narrow MoE whose tokens have layers x top_k ids."""
    cfg = models.config(moe=True, layers=options.layers)
    return cfg | {
        "hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "moe_intermediate_size": 32, "mlp_only_layers": [],
        "num_experts": options.experts, "num_experts_per_tok": options.top_k,
        "max_position_embeddings": options.prompt + options.tokens,
    }  # fmt: skip


def cpu_seconds(front: int) -> dict[str, float]:
    """CPU time so far of the engine's own process and of vLLM's below it."""
    spent = {"front end": 0.0, "core": 0.0}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if front in (int(entry.name), int(fields[1])):
                spent["front end" if int(entry.name) == front else "core"] += (
                    int(fields[11]) + int(fields[12])
                ) / TICKS
    return spent


async def ask(engine, options: argparse.Namespace, capture: bool) -> None:
    """All requests at once, each to its last token."""
    async with open_channel(engine.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)

        async def one(number: int) -> int:
            prompt = np.random.default_rng(number).integers(3, models.VOCAB, options.prompt).astype(np.int32)
            request = pb.GenerateRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=to_tensor(prompt),
                sampling=sample.SamplingParams(
                    max_new_tokens=options.tokens, temperature=1.0, ignore_eos=True, seed=number
                ),
                return_routing=capture,
            )
            rows = 0
            async for message in stub.Generate(request):
                rows += message.routing.header.rows
            return rows

        rows = await asyncio.gather(*(one(number) for number in range(options.requests)))
    expected = options.prompt + options.tokens - 1 if capture else 0
    if set(rows) != {expected}:
        raise RuntimeError(f"answers have {sorted(set(rows))} rows of routes, not {expected}")


def measure(engine, options: argparse.Namespace, capture: bool) -> dict[str, float]:
    """Tokens a second, and milliseconds of CPU a step in each process."""
    before, began = cpu_seconds(engine.process.pid), time.perf_counter()
    asyncio.run(ask(engine, options, capture))
    seconds, after = time.perf_counter() - began, cpu_seconds(engine.process.pid)
    return {
        "tokens/s": options.requests * options.tokens / seconds,
        **{name: 1e3 * (after[name] - before[name]) / options.tokens for name in after},
    }


def main() -> None:
    """Runs all engines beside one another; only one of them has work at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, flags in ENGINES.items():
            more = ["--cpu-threads", "1", "--max-num-seqs", str(options.requests), "--prefix-caching=false"]
            engines[name] = stack.enter_context(running("capture", model(options), 1, *flags, *more))
        for number in range(-1, options.rounds):
            for name in list(ENGINES)[:: -1 if number % 2 else 1]:
                figures = measure(engines[name], options, name != "off")
                if number >= 0:
                    found[name].append(figures)
    ids = options.layers * options.top_k
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; {options.requests} requests, {ids} ids a token, {options.rounds} rounds"
    )
    for name, rounds in found.items():
        line = []
        for key in rounds[0]:
            values = [one[key] for one in rounds]
            unit = "" if key == "tokens/s" else " ms a step"
            line.append(f"{key} {statistics.median(values):.1f}{unit} ({min(values):.1f} to {max(values):.1f})")
        print(f"{name:7} {', '.join(line)}")


if __name__ == "__main__":
    main()
