"""Speed of the trace codec against a plain memory copy of the same bytes, in one run, and bytes per token.

python benchmarks/bench_trace.py [--tokens 8192] [--repeats 21]
"""

from __future__ import annotations

import argparse
import functools
import platform
import time

import numpy as np

from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import policy_version
from vime_r3 import trace as codec

# name: MoE layers, experts, top-k, first MoE layer.
MODELS = {"Qwen3-30B-A3B": (48, 128, 8, 0), "GLM-4.5": (89, 160, 8, 3)}


def routes(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """Distinct ids whose popularity falls off as real routers' does."""
    rng = np.random.default_rng(seed)
    favour = rng.normal(0.0, 1.0, (layers, experts)).astype(np.float32)
    ids = np.empty((tokens, layers, top_k), dtype=np.uint8 if experts <= 256 else np.uint16)
    for layer in range(layers):
        scores = favour[layer] + rng.gumbel(0.0, 1.0, (tokens, experts)).astype(np.float32)
        ids[:, layer] = np.argpartition(-scores, top_k, axis=1)[:, :top_k]
    return ids


def best(work, repeats: int) -> float:
    """Seconds of the fastest call: what a neighbour on the host adds is not the codec's."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(layers: int, experts: int, top_k: int, first: int, tokens: int, repeats: int) -> None:
    """Prints one model's figures."""
    ids = routes(tokens, layers, experts, top_k)
    numbers = tuple(range(first, first + layers))
    stage = layers // 4
    model = {"ids": ids, "layer_ids": numbers, "experts": experts, "version": policy_version("bench", 0, 1)}
    encode = functools.partial(codec.encode, **model)
    unchecked = functools.partial(encode, check=False)
    plain, layered = encode(), encode(chunk_layers=stage)
    data = plain.SerializeToString()
    squeezed = encode(compression=pb.COMPRESSION_ZSTD)
    work = {
        "memory copy": ids.copy,
        "ids to bytes, ids checked before": functools.partial(codec.dumps, check=False, **model),
        "bytes to ids, ids checked before": lambda: codec.loads(data, check=False),
        "encode, ids checked before": unchecked,
        "encode": encode,
        "encode, layers in quarters, ids checked before": functools.partial(unchecked, chunk_layers=stage),
        "encode, zstd, ids checked before": functools.partial(unchecked, compression=pb.COMPRESSION_ZSTD),
        "decode, ids checked before": lambda: codec.decode(plain, check=False),
        "decode": lambda: codec.decode(plain),
        "decode, layers in quarters, ids checked before": lambda: codec.decode(layered, check=False),
        "decode, zstd, ids checked before": lambda: codec.decode(squeezed, check=False),
        "select a quarter of the layers": lambda: codec.select(layered, layer_ids=numbers[:stage]),
    }
    seconds = {what: best(call, repeats) for what, call in work.items()}
    copy = seconds["memory copy"]
    print(f"{layers} MoE layers, {experts} experts, top-{top_k}, {ids.nbytes / 2**20:.1f} MiB")
    for what, took in seconds.items():
        print(f"  {what:<47} {took * 1e3:8.2f} ms {ids.nbytes / took / 1e9:7.2f} GB/s {copy / took:6.2f} of a copy")
    for what, trace in {"uncompressed": plain, "zstd": squeezed}.items():
        header = trace.header.ByteSize()
        print(f"  {what:<47} {trace.ByteSize() / tokens:8.1f} bytes a token; the header has {header} bytes in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {options.tokens} tokens, best of {options.repeats}")
    for name, model in MODELS.items():
        print(f"\n{name}: ", end="")
        measure(*model, options.tokens, options.repeats)


if __name__ == "__main__":
    main()
