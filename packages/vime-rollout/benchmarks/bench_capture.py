"""What route capture costs an engine: off, as vime-rollout does it, and as vLLM alone does it, in alternating order.

    python benchmarks/bench_capture.py [--layers 48 --experts 16 --top-k 8] [--requests 128 --tokens 48 --rounds 5]
    python benchmarks/bench_capture.py --model FOLDER --requests 256 --prompt 128 --tokens 512   # on a GPU, shared by all

Three engines with one MoE; a round asks one of them. With `--waves 1` all requests come at once and have equally many tokens:
all prompts are read together, and all answers go out together when the engine has nothing left to do. With more, answers have half
to one and a half times as many tokens, and the next request comes when one ends, as in a rollout.

Prints medians: tokens a second, and the CPU time of a step (one token for each place) in front end and core (on CPU without the
worker that runs the model), which moves less with whatever else a host does; and the ratio of on to off, round by round. The host
of a GPU runs the same Python for a step as a CPU's: only ids a token (layers times top-k) and requests count, so the model can be
narrow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from answers import add_waves, lengths, longest

from vime_proto.channel import open_channel
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
import models
from conftest import EngineProcess, running

ENGINES = {
    "off": (),
    "on": ("--route-capture",),
    # Named, vLLM's own scheduler takes the place of vime-rollout's.
    "vLLM's": ("--route-capture", "--vllm.scheduler_cls", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"),
}
_CACHE = 12 << 30
"""Bytes: all requests at once, so that none is preempted."""
TICKS = os.sysconf("SC_CLK_TCK")


def model(options: argparse.Namespace) -> dict:
    """A narrow MoE whose tokens have layers x top_k ids."""
    cfg = models.config(moe=True, layers=options.layers)
    return cfg | {
        "hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "moe_intermediate_size": 32, "mlp_only_layers": [],
        "num_experts": options.experts, "num_experts_per_tok": options.top_k,
        "max_position_embeddings": options.prompt + longest(options),
    }  # fmt: skip


@contextlib.contextmanager
def on_gpu(name: str, *arguments: str) -> Iterator[EngineProcess]:
    """An engine of a model that exists, in bfloat16; it becomes ready while others start."""
    folder, *flags = arguments
    with tempfile.TemporaryDirectory() as root:
        memory = ["--vllm.gpu_memory_utilization", "0.25", "--vllm.kv_cache_memory_bytes", str(_CACHE)]
        flags = ["--dtype", "bfloat16", *memory, *flags]
        engine = EngineProcess(Path(folder), Path(root) / name, *flags, wait=False)
        try:
            yield engine
            engine.stop()
        finally:
            engine.process.kill()
            engine.log_file.close()


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


async def ask(engine, options: argparse.Namespace, answers: list[int], capture: bool) -> None:
    """All requests, each to its last token."""
    places = asyncio.Semaphore(options.requests)
    async with open_channel(engine.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)

        async def one(number: int, tokens: int) -> None:
            prompt = np.random.default_rng(number).integers(3, models.VOCAB, options.prompt).astype(np.int32)
            request = pb.GenerateRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=to_tensor(prompt),
                sampling=sample.SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True, seed=number),
                return_routing=capture,
            )
            rows = 0
            async with places:
                async for message in stub.Generate(request):
                    rows += message.routing.header.rows
            expected = options.prompt + tokens - 1 if capture else 0
            if rows != expected:
                raise RuntimeError(f"an answer has {rows} rows of routes, not {expected}")

        await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(answers)))


def measure(engine, options: argparse.Namespace, capture: bool) -> dict[str, float]:
    """Tokens a second, and milliseconds of CPU a step in each process."""
    answers = lengths(options)
    before, began = cpu_seconds(engine.process.pid), time.perf_counter()
    asyncio.run(ask(engine, options, answers, capture))
    seconds, after = time.perf_counter() - began, cpu_seconds(engine.process.pid)
    tokens = sum(answers)
    steps = tokens / options.requests
    return {
        "tokens/s": tokens / seconds,
        **{name: 1e3 * (after[name] - before[name]) / steps for name in after},
    }


def main() -> None:
    """Runs all engines beside one another; only one of them has work at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a model that exists; on a GPU")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    add_waves(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="off is always there")
    options = parser.parse_args()
    chosen = {name: ENGINES[name] for name in dict.fromkeys(["off", *options.engines])}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, flags in chosen.items():
            more = [*flags, "--max-num-seqs", str(options.requests), "--prefix-caching=false"]
            if options.model is None:
                start = running("capture", model(options), 1, *more, "--cpu-threads", "1")
            else:
                start = on_gpu(name, options.model, *more)
            engines[name] = stack.enter_context(start)
        if options.model is not None:
            for engine in engines.values():
                engine.connect()
        for number in range(-1, options.rounds):
            for name in list(chosen)[:: -1 if number % 2 else 1]:
                figures = measure(engines[name], options, name != "off")
                print(f"{name} {figures}", file=sys.stderr, flush=True)
                if number >= 0:
                    found[name].append(figures)
    what = f"{options.layers * options.top_k} ids a token" if options.model is None else options.model
    load = f"{options.requests} places, {options.waves} waves, {what}, {options.rounds} rounds"
    print(f"{platform.machine()}, {os.cpu_count()} cores; {load}")
    for name, rounds in found.items():
        line = []
        for key in rounds[0]:
            values = [one[key] for one in rounds]
            unit = "" if key == "tokens/s" else " ms a step"
            line.append(f"{key} {statistics.median(values):.1f}{unit} ({min(values):.1f} to {max(values):.1f})")
        print(f"{name:7} {', '.join(line)}")
    for name in list(chosen)[1:]:
        ratios = sorted(one["tokens/s"] / off["tokens/s"] for one, off in zip(found[name], found["off"], strict=True))
        print(f"{name:7} tokens/s over off: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
