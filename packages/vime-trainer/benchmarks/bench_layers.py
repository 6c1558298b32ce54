"""Megatron's local layers with this package's parts beside Transformer Engine's layers: the same weights, in turn.

    python benchmarks/bench_layers.py [--shape demo|qwen3-4b|qwen3-30b-a3b-8-layers ...] [--rounds N] [--seconds S]

Passes alternate in one process, all models in memory; whole steps come one after the other. Log-probs are compared with those of
float32. With routed experts a third model has Transformer Engine's experts as well. Where Transformer Engine cannot be used the
local layers are measured alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from bench_model_step import SHAPES, build, make_batch, step_flops, whole_step, without
from rounds import Parts, alternate, clear, peak_gib, ratios, synchronize, timed_pass

from vime_trainer.megatron._transformer_engine import why_missing
from vime_trainer.packed import PackedBatch, RecordRows
from vime_trainer.policy import Policy

KINDS = {"local": "off", "te": "on", "te-experts": "on"}
"""`te-experts` has Transformer Engine's experts too, where `te` has the stacked ones."""


def watched_pass(policy: Policy, batch: PackedBatch, others: float) -> Sequence[float]:
    """Seconds of a forward pass with gradients, of both passes, and the peak in GiB without `others`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return *timed_pass(policy, batch), peak_gib() - others


def timed_step(gradients: Callable[[], None], update: Callable[[], object]) -> Sequence[float]:
    """Seconds of a whole step, and of the optimizer's part; the parts are waited for."""
    synchronize()
    begin = time.perf_counter()
    gradients()
    synchronize()
    middle = time.perf_counter()
    update()
    synchronize()
    end = time.perf_counter()
    return end - begin, end - middle


def gib_of(policy: Policy) -> float:
    return sum(param.nbytes for param in policy.parameters().values()) / (1 << 30) if torch.cuda.is_available() else 0.0


def show(what: str, seconds: Sequence[float], flops: float = 0.0, peak: float = 0.0) -> None:
    median = statistics.median(seconds)
    text = f"{what:52} {median * 1e3:9.2f} ms median {min(seconds) * 1e3:9.2f} to {max(seconds) * 1e3:9.2f}"
    text += f" of {len(seconds)}"
    if flops:
        text += f"  {flops / median / 1e12:7.2f} TFLOP/s"
    if peak:
        text += f"  peak {peak:.1f} GiB"
    print(text, flush=True)


def make(shape: str, kind: str) -> Policy:
    config, dtype, _ = SHAPES[shape]
    with without(*(["experts"] if kind == "te-experts" else [])):
        return build(config, dtype, KINDS[kind])


def compare_logprobs(shape: str, found: dict[str, Policy], batch: PackedBatch) -> None:
    """Mean difference from float32 of the same weights; with experts also when float32's routes are replayed."""
    config, _, _ = SHAPES[shape]
    real = batch.positions > 0
    routed = "num_experts_per_tok" in config
    with torch.no_grad():
        exact = build(config, "float32")
        if routed:
            exact.attach_replay()
        reference = exact(replace(batch, routes=RecordRows() if routed else None)).logprobs.cpu()[real]
        batches = {"": batch}
        if routed:
            batches[", float32's routes replayed"] = replace(batch, routes=replace(exact.recorded[0], measure=True))
        del exact
        clear()
        values: dict[str, torch.Tensor] = {}
        for how, given in batches.items():
            for name, policy in found.items():
                if routed:
                    policy.attach_replay()
                out = policy(given)
                values[name] = out.logprobs.cpu()[real]
                off = (values[name] - reference).abs()
                flips = "" if out.usage is None else f", {share_of_flips(out.usage):.2%} of token-layers flip"
                what = f"{shape} {name}: log-probs from float32{how}"
                print(f"{what:72} mean {off.mean():.5f} max {off.max():.4f}{flips}", flush=True)
            for name in values.keys() - {"local"} if "local" in values else ():
                apart = (values[name] - values["local"]).abs()
                print(f"{shape} {name} from local{how}: mean {apart.mean():.5f} max {apart.max():.4f}", flush=True)
    for policy in found.values():
        for replay in policy.replays:
            replay.detach()
        policy.replays = []


def share_of_flips(usage) -> float:
    return float(usage.flips.sum()) / (len(usage.layer_ids) * usage.tokens)


def measure(shape: str, kinds: Sequence[str], rounds: int, parts: Parts) -> None:
    config, dtype, lengths = SHAPES[shape]
    flops, batch = step_flops(config, dtype, lengths), make_batch(config, lengths)
    found: dict[str, Policy] = {}

    def first_passes(name: str) -> None:
        found[name] = tried(make(shape, name), batch)
        if name != "local":
            print(f"{shape} {name}: attention by {attention()}", flush=True)

    def whole_steps(name: str) -> None:
        measure_steps(f"{shape} {name}", make(shape, name), batch, rounds, flops, parts)

    for name in kinds:
        clear()
        parts.run(f"{shape} {name}: first passes", partial(first_passes, name))
    clear()
    parts.run(f"{shape}: log-probs", partial(compare_logprobs, shape, found, batch))
    clear()
    parts.run(f"{shape}: passes", partial(measure_passes, shape, found, batch, rounds, flops, parts))
    names = list(found)
    found.clear()
    for name in names:
        clear()
        parts.run(f"{shape} {name}: whole steps", partial(whole_steps, name))
    clear()


def tried(policy: Policy, batch: PackedBatch) -> Policy:
    """The policy, if it runs."""
    timed_pass(policy, batch)
    return policy


def attention() -> str:
    """Which of Transformer Engine's attentions ran last."""
    from transformer_engine.pytorch.attention import dot_product_attention

    chosen = getattr(dot_product_attention, "_attention_backends", {})
    return ", ".join(name for name in ("flash", "fused", "unfused") if chosen.get(f"use_{name}_attention")) or "ours"


def measure_passes(
    shape: str, found: dict[str, Policy], batch: PackedBatch, rounds: int, flops: float, parts: Parts
) -> None:
    sizes = {name: gib_of(policy) for name, policy in found.items()}
    runs = {
        name: partial(watched_pass, policy, batch, sum(sizes.values()) - sizes[name]) for name, policy in found.items()
    }
    kept = alternate(runs, rounds, 2, lambda: parts.left)
    columns = {name: list(zip(*values, strict=True)) for name, values in kept.items()}
    for name, (forward, both, peaks) in columns.items():
        show(f"{shape} {name}: forward", forward, flops / 3)
        show(f"{shape} {name}: forward and backward", both, flops, max(peaks))
    for name in columns.keys() - {"local"} if "local" in columns else ():
        for place, what in enumerate(("forward", "forward and backward")):
            ratio = ratios(columns[name][place], columns["local"][place])
            print(f"{shape} {name} to local, {what}: {ratio}", flush=True)


def measure_steps(name: str, policy: Policy, batch: PackedBatch, rounds: int, flops: float, parts: Parts) -> None:
    gradients, optimizer = whole_step(policy, batch)
    kept = alternate({name: partial(timed_step, gradients, optimizer.step)}, rounds, 2, lambda: parts.left)
    whole, update = zip(*kept[name], strict=True)
    show(f"{name}: whole step with AdamW", whole, flops, peak_gib())
    show(f"{name}: AdamW of it", update)


def main() -> None:
    parser = argparse.ArgumentParser()
    large = [name for name in SHAPES if name != "demo"]
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=large if torch.cuda.is_available() else ["demo"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=150.0, help="no part begins after that")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"on {where}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    missing = why_missing() if torch.cuda.is_available() else "there is no GPU"
    if missing is not None:
        print(f"Transformer Engine cannot be used, so the local layers are alone: {missing}", flush=True)
    else:
        from importlib.metadata import version

        print(f"Transformer Engine {version('transformer-engine')}", flush=True)
    parts = Parts(args.seconds)
    for shape in args.shape:
        kinds = ["local"] if missing is not None else ["local", "te"]
        if missing is None and "num_experts_per_tok" in SHAPES[shape][0]:
            kinds.append("te-experts")
        measure(shape, kinds, args.rounds, parts)
    raise SystemExit(parts.end())


if __name__ == "__main__":
    main()
