"""What routing replay costs a training pass: with and without it in turn, the ratio taken within each round.

    python benchmarks/bench_replay.py [--shape demo|qwen3-30b-a3b-8-layers|sixteen-layers ...] [--rounds N] [--te] [--seconds S]

The routes replayed are those that the model itself chose before, so that all passes bring the same tokens to the same experts.
As after a rollout, the last token of each sequence has no row and routes itself. `sixteen-layers` is a mixture of 64 experts a
layer, 8 a token, bfloat16: 16,384 tokens in 25 sequences and a rest.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from bench_model_step import SHAPES, build, make_batch
from rounds import Parts, alternate, clear, ratios, synchronize, timed_pass

from vime_trainer.packed import PackedBatch, RecordRows
from vime_trainer.policy import Policy

SIXTEEN_LAYERS = {
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}
MIXTURES = {name: shape for name, shape in SHAPES.items() if "num_experts_per_tok" in shape[0]} | {
    "sixteen-layers": (SIXTEEN_LAYERS, "bfloat16", [640] * 25 + [384])
}
GOAL = 1.02
"""Most of a forward pass with replay, to one without."""


def variants(policy: Policy, batch: PackedBatch) -> dict[str, PackedBatch]:
    """The batch without routes, and with those that the model chose just now."""
    with torch.no_grad():
        policy(replace(batch, routes=RecordRows()))
    routes = policy.recorded[0]
    valid = np.ones(batch.total, bool)
    valid[batch.cu_seqlens[1:].numpy() - 1] = False
    routes = replace(routes, valid=valid, exact=np.ones(batch.total, bool))
    return {
        "without": batch,
        "replay": replace(batch, routes=routes),
        "replay, flips counted": replace(batch, routes=replace(routes, measure=True)),
    }


def scored(policy: Policy, batch: PackedBatch) -> Sequence[float]:
    """Seconds of a forward pass without gradients."""
    with torch.no_grad():
        synchronize()
        begin = time.perf_counter()
        policy(batch)
        synchronize()
        return (time.perf_counter() - begin,)


def check_same_work(batches: dict[str, PackedBatch], policy: Policy) -> None:
    """Says how many rows were replayed, and how many flip: next to none, since the model chose them."""
    with torch.no_grad():
        usage = policy(batches["replay, flips counted"]).usage
    taken, flips = int((usage.replayed > 0).sum()), int(usage.flips.sum())
    print(
        f"  {taken} of {usage.tokens} tokens replayed, {flips} of {taken * len(usage.layer_ids)} rows flip", flush=True
    )


def report(what: str, kept: dict[str, list[float]]) -> None:
    for name, seconds in kept.items():
        text = f"{what:52} {name:22} {statistics.median(seconds) * 1e3:9.3f} ms median, {min(seconds) * 1e3:9.3f} best"
        if name != "without":
            text += f", to without: {ratios(seconds, kept['without'])}"
        print(text, flush=True)


def measure(shape: str, kind: str, rounds: int, parts: Parts) -> None:
    config, dtype, lengths = MIXTURES[shape]
    policy = build(config, dtype, "on" if kind == "te" else "off")
    policy.attach_replay()
    batches = variants(policy, make_batch(config, lengths))
    check_same_work(batches, policy)
    runs: dict[str, Callable[[], Sequence[float]]]
    runs = {name: partial(timed_pass, policy, batch) for name, batch in batches.items()}
    kept = alternate(runs, rounds, 4, lambda: parts.left)
    for place, what in enumerate(("forward", "forward and backward")):
        report(f"{shape} {kind}: {what}", {name: [one[place] for one in all_] for name, all_ in kept.items()})
    runs = {name: partial(scored, policy, batch) for name, batch in batches.items()}
    kept = alternate(runs, rounds, 4, lambda: parts.left)
    report(
        f"{shape} {kind}: forward without gradients", {name: [one[0] for one in all_] for name, all_ in kept.items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    large = [name for name in MIXTURES if name != "demo"]
    parser.add_argument(
        "--shape", nargs="+", choices=MIXTURES, default=large if torch.cuda.is_available() else ["demo"]
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--te", action="store_true", help="with Transformer Engine's layers too")
    parser.add_argument("--seconds", type=float, default=100.0, help="no part begins after that")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"on {where}, torch {torch.__version__}; goal: a forward pass x {GOAL} at most", flush=True)
    parts = Parts(args.seconds)
    for kind in ("local", "te") if args.te else ("local",):
        for shape in args.shape:
            clear()
            parts.run(f"{shape} {kind}", partial(measure, shape, kind, args.rounds, parts))
    raise SystemExit(parts.end())


if __name__ == "__main__":
    main()
