"""Speed of the trace codec against a memory copy of the same bytes, in one run, and bytes per token.

The limit is ``bytes(view)``: the ids are copied once into a bytes object that is allocated for the purpose, as the codec's
results are. Both get their memory from the same allocator in the same state, and drop it at once, so most pages were touched
before; pages never touched would cost copy and codec the same page faults and bring every ratio nearer to 1. To write, the
limit copies the array that is encoded; to read, the payload within the bytes that are decoded.

Each case runs in rounds of its own, with a copy right before it and right after it in turn; each figure is a median over rounds,
and in brackets are the quartiles of the rounds' ratios. The clock is this thread's processor time: the codec has one thread, and
what else runs on the machine counts only as far as it takes cache and memory bandwidth.

What protobuf takes alone stands beside what goes through its messages. Its bytes fields are copied from a bytes object when they
are set and to a new one when they are read, and serializing copies twice.

python benchmarks/bench_trace.py [--tokens 8192 32768] [--rounds 40]
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import policy_version
from vime_r3 import trace as codec

# name: MoE layers, experts, top-k, first MoE layer.
MODELS = {"Qwen3-30B-A3B": (48, 128, 8, 0), "GLM-4.5": (89, 160, 8, 3)}
# Routes of so many tokens are drawn, and repeated from there on: more than a chunk has.
DRAWN = 2048


def routes(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """Distinct ids whose popularity falls off as real routers' does."""
    rng = np.random.default_rng(seed)
    favour = rng.normal(0.0, 1.0, (layers, experts)).astype(np.float32)
    ids = np.empty((min(tokens, DRAWN), layers, top_k), dtype=np.uint8 if experts <= 256 else np.uint16)
    for layer in range(layers):
        scores = favour[layer] + rng.gumbel(0.0, 1.0, (len(ids), experts)).astype(np.float32)
        ids[:, layer] = np.argpartition(-scores, top_k, axis=1)[:, :top_k]
    return np.ascontiguousarray(np.resize(ids, (tokens, layers, top_k)))


class Race:
    """A case's rounds against its limit."""

    def __init__(self, case: Callable[[], object], limit: Callable[[], object]):
        self._calls = limit, case
        self._times: tuple[list[float], list[float]] = [], []

    def run(self, rounds: int) -> None:
        """Runs both in turn, the limit first in every other round. The first rounds, which settle the allocator, do not count."""
        for number in range(-4, rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                start = time.thread_time()
                result = self._calls[which]()
                took = time.thread_time() - start
                if number >= 0:
                    self._times[which].append(took)
                # Freed before the next call, and not while the clock runs.
                del result

    def figures(self) -> tuple[float, float, list[float]]:
        """Median seconds of the case, median of the limit over that of the case, quartiles of the rounds' ratios."""
        limit, case = map(statistics.median, self._times)
        ratios = [copy / took for copy, took in zip(*self._times, strict=True)]
        return case, limit / case, statistics.quantiles(ratios, n=4)


def serialized(trace: pb.RoutingTrace) -> bytes:
    """A sample with this trace, as a call sends it."""
    sample = sample_pb2.Sample(sample_id="bench")
    sample.routing.CopyFrom(trace)
    return sample.SerializeToString()


def races(ids: np.ndarray, numbers: tuple[int, ...], experts: int) -> dict[str, Race]:
    """All cases of one array."""
    stage = len(numbers) // 4
    model = {"ids": ids, "layer_ids": numbers, "experts": experts, "version": policy_version("bench", 0, 1)}
    encode, dumps = functools.partial(codec.encode, **model), functools.partial(codec.dumps, **model)
    plain, layered = encode(), encode(chunk_layers=stage)
    data, squeezed = plain.SerializeToString(), encode(compression=pb.COMPRESSION_ZSTD)
    message = serialized(plain)
    array, payload = memoryview(ids).cast("B"), memoryview(data)[-ids.nbytes :]
    write, read = functools.partial(bytes, array), functools.partial(bytes, payload)
    cases = {
        "a copy against itself": (write, write),
        "ids to bytes (dumps)": (functools.partial(dumps, check=False), write),
        "bytes to ids (loads)": (lambda: codec.loads(data, check=False), read),
        "ids to message (encode)": (functools.partial(encode, check=False), write),
        "  protobuf alone: make bytes, set them": (lambda: pb.RoutingTrace(inline=bytes(array)), write),
        "message to ids (decode)": (lambda: codec.decode(plain, check=False), read),
        "  protobuf alone: read the bytes": (lambda: plain.inline, read),
        "ids to a serialized sample": (lambda: serialized(encode(check=False)), write),
        "  protobuf alone": (lambda: serialized(pb.RoutingTrace(inline=bytes(array))), write),
        "serialized sample to ids": (
            lambda: codec.decode(sample_pb2.Sample.FromString(message).routing, check=False),
            read,
        ),
        "  protobuf alone: parse, read": (lambda: sample_pb2.Sample.FromString(message).routing.inline, read),
        "dumps, every id checked": (dumps, write),
        "loads, every id checked": (lambda: codec.loads(data), read),
        "encode, layers in quarters": (functools.partial(encode, chunk_layers=stage, check=False), write),
        "decode, layers in quarters": (lambda: codec.decode(layered, check=False), read),
        "select a quarter of the layers": (lambda: codec.select(layered, layer_ids=numbers[:stage]), read),
        "encode, zstd": (functools.partial(encode, compression=pb.COMPRESSION_ZSTD, check=False), write),
        "decode, zstd": (lambda: codec.decode(squeezed, check=False), read),
    }
    for what, trace in {"uncompressed": plain, "zstd": squeezed}.items():
        size, header = trace.ByteSize() / len(ids), trace.header.ByteSize()
        print(f"  {what}: {size:.1f} bytes a token, of which the header has {header} bytes in all")
    return {name: Race(*calls) for name, calls in cases.items()}


def measure(layers: int, experts: int, top_k: int, first: int, tokens: int, rounds: int) -> None:
    """Prints one model's figures."""
    ids = routes(tokens, layers, experts, top_k)
    print(f"{tokens} tokens, {layers} MoE layers, {experts} experts, top-{top_k}, {ids.nbytes / 2**20:.1f} MiB")
    running = races(ids, tuple(range(first, first + layers)), experts)
    for name, race in running.items():
        race.run(rounds)
        took, ratio, (low, _, high) = race.figures()
        speed = ids.nbytes / took / 1e9
        print(f"  {name:<38} {took * 1e3:8.2f} ms {speed:6.2f} GB/s {ratio:5.2f} of a copy ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, medians of {options.rounds} rounds; ids checked before, or so stated"
    )
    for name, model in MODELS.items():
        for tokens in options.tokens:
            print(f"\n{name}: ", end="")
            measure(*model, tokens, options.rounds)


if __name__ == "__main__":
    main()
