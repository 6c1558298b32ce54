"""Saving and restoring a dense model with its optimizer in one process: how long, and how long training stands still.

    python benchmarks/bench_checkpoint.py [--layers 8] [--hidden 512] [--repeats 3] [--folder DIR]

Prints one JSON line: medians and extremes in seconds, megabytes of a checkpoint, the processor.
`stall` is what `save` takes when it is asynchronous (the copy to host memory), `write` the rest;
`write_floor` is one plain file of as many bytes, written and flushed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vime_trainer.checkpoint import POLICY, RunState, Saver, Trained, load_models
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.policy import Policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measure(options, Path(folder))))


def measure(options: argparse.Namespace, root: Path) -> dict[str, object]:
    """Seconds of each phase, once a repeat."""
    trained = {POLICY: make(options, root)}
    step(trained[POLICY])
    seconds: dict[str, list[float]] = {name: [] for name in ("save", "stall", "write", "restore", "write_floor")}
    size = 0
    for number in range(options.repeats):
        path = timed(seconds["save"], lambda n=number: Saver(root / "s", 1).save(trained, RunState(n)).result())
        size = sum(file.stat().st_size for file in path.iterdir())
        saver = Saver(root / "a", 1, asynchronous=True)
        timed(seconds["stall"], lambda n=number, s=saver: s.save(trained, RunState(n)))
        timed(seconds["write"], saver.wait)
        timed(seconds["restore"], lambda p=path: load_models(p, trained))
        timed(seconds["write_floor"], lambda n=size: plain(root / "plain", n))
    shown = {
        name: [round(pick(values), 3) for pick in (statistics.median, min, max)] for name, values in seconds.items()
    }
    return {"median_min_max_seconds": shown, "megabytes": round(size / 1e6), "machine": machine()}


def make(options: argparse.Namespace, root: Path) -> Trained:
    """A random Qwen3 with a float32 optimizer."""
    config = {
        "model_type": "qwen3",
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": options.hidden // 8,
        "intermediate_size": 3 * options.hidden,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    (root / "config.json").write_text(json.dumps(config))
    policy = Policy.from_config(root)
    return Trained(policy, Optimizer(policy, OptimizerSettings()))


def step(trained: Trained) -> None:
    """One update, so that there are moments."""
    trained.optimizer.zero_grad()
    trained.policy(pack([list(range(16))])).logprobs.sum().backward()
    trained.optimizer.step()


def timed(seconds: list[float], function):
    """Adds the call's duration."""
    start = time.perf_counter()
    result = function()
    seconds.append(time.perf_counter() - start)
    return result


def plain(path: Path, size: int) -> None:
    """One file, block by block, flushed to the disk."""
    block = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8).numpy()
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: min(len(block), size - start)])
        file.flush()
        os.fsync(file.fileno())


def machine() -> str:
    """Cores and processor."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}"


if __name__ == "__main__":
    main()
