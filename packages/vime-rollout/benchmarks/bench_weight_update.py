"""Seconds and bytes per second of a weight update, by transport, against a plain memory copy in the same run.

    python benchmarks/bench_weight_update.py --repeats 5

A random model is made (about 200 MB unless told otherwise). Prints one line a transport: median seconds from Begin to Commit (what
requests wait), bytes per second, and that rate as a share of copying the same bytes once in memory.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
import models
from conftest import running
from pushing import manifest_of


def memory_copy(tensors, repeats: int) -> float:
    """Bytes per second of copying all tensors once."""
    targets = [np.empty_like(one) for one in tensors.values()]
    total = sum(one.nbytes for one in targets)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for target, source in zip(targets, tensors.values(), strict=True):
            np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return total / statistics.median(times)


def one_update(engine, pusher, chunks: int) -> float:
    """Seconds from Begin to Commit; the sender's own writing of files is not counted."""
    manifest, parts = manifest_of(engine.tensors, engine.next_version(), chunks)
    if pusher.kind != "stream":
        pusher.write(manifest, parts)
    began = time.perf_counter()
    pusher.begin(manifest)
    for index in range(len(parts["rank0"])):
        pusher.load(manifest, parts, chunks=[index])
    pusher.commit(manifest)
    return time.perf_counter() - began


def main() -> None:
    """Runs all transports on one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=768, help="width of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--moe", action="store_true", help="mixture of experts instead of a dense model")
    options = parser.parse_args()
    cfg = models.config(moe=options.moe, layers=options.layers)
    cfg |= {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "vocab_size": 8192}
    with running("benchmark", cfg, 1) as engine:
        total = sum(one.nbytes for one in engine.tensors.values())
        copy = memory_copy(engine.tensors, options.repeats)
        print(f"{platform.node()} {platform.machine()}, {total / 1e6:.0f} MB in {len(engine.tensors)} tensors")
        print(f"memory copy: {copy / 1e9:.2f} GB/s")
        for kind in ("shm", "file", "stream"):
            pusher = engine.pusher(kind)
            for chunks in options.chunks:
                one_update(engine, pusher, chunks)
                seconds = statistics.median(one_update(engine, pusher, chunks) for _ in range(options.repeats))
                rate = total / seconds
                print(
                    f"{kind}, {chunks} chunks: {seconds:.3f} s, {rate / 1e9:.2f} GB/s, {100 * rate / copy:.0f} % of a copy"
                )


if __name__ == "__main__":
    main()
