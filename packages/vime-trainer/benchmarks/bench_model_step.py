"""Passes and optimizer steps of one model shape, with each of the faster ways turned off in turn.

    python benchmarks/bench_model_step.py [--shape demo|qwen3-4b|qwen3-30b-a3b-8-layers] [--repeats N] [--optimizer] [--experts]

`demo` is the tiny Qwen3-MoE: 256 rows of 11 tokens, float32. The others are bfloat16, four sequences of 2,048 tokens, and need a
GPU. `--optimizer` times whole steps, and the optimizer alone. `--experts` times Megatron's one module an expert beside the stacked
experts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from rounds import synchronize

from vime_trainer import models
from vime_trainer.fused import Switches, switches
from vime_trainer.megatron import ParallelConfig, TransformerEngine, _transformer_engine, build_model
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.plan import Workload, make_plan
from vime_trainer.policy import Policy

DEMO = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LARGE = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
QWEN3_4B = LARGE | {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B_8_LAYERS = LARGE | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SHAPES = {
    "demo": (DEMO, "float32", [11] * 256),
    "qwen3-4b": (QWEN3_4B, "bfloat16", [2048] * 4),
    "qwen3-30b-a3b-8-layers": (QWEN3_30B_A3B_8_LAYERS, "bfloat16", [2048] * 4),
}


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Some switches off; those that a model is built with must be off before that."""
    for name in names:
        setattr(switches, name, False)
    try:
        yield
    finally:
        for name in names:
            setattr(switches, name, True)


def build(config: dict, dtype: str, transformer_engine: TransformerEngine = "off", std: float = 0.02) -> Policy:
    """Random weights made on the device: the same numbers, rounded to bfloat16, for either kind of layers and either type."""
    policy = Policy(models.HfConfig(config), dtype, "packed", recompute=False, transformer_engine=transformer_engine)
    generator = torch.Generator(policy.device).manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(policy.weights().items()):
            if len(weight.shape) > 1:
                whole = torch.empty(weight.shape, dtype=torch.bfloat16, device=policy.device)
                weight.copy_(whole.normal_(0.0, std, generator=generator))
    return policy


def make_batch(config: dict, lengths: list[int]):
    make = torch.Generator().manual_seed(0)
    return pack([torch.randint(0, config["vocab_size"], (length,), generator=make) for length in lengths])


def step_flops(config: dict, dtype: str, lengths: list[int]) -> float:
    """Arithmetic of a forward and backward pass."""
    work = Workload(micro_batch_tokens=sum(lengths), sequence_length=lengths[0], dtype=dtype)
    return make_plan(models.HfConfig(config), ParallelConfig(), 1, work).step_flops


def passes(policy: Policy, batch) -> Callable[[], None]:
    params = list(policy.parameters().values())

    def run() -> None:
        for param in params:
            param.grad = None
        policy(batch).logprobs.sum().backward()

    return run


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, after three that are not counted."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def show(what: str, seconds: list[float], flops: float) -> None:
    median = statistics.median(seconds)
    text = f"{what:42} {min(seconds) * 1e3:9.2f} ms best {median * 1e3:9.2f} ms median of {len(seconds)}"
    if torch.cuda.is_available():
        text += f"  {flops / median / 1e12:6.1f} TFLOP/s  peak {torch.cuda.max_memory_allocated() / (1 << 30):.1f} GiB"
        torch.cuda.reset_peak_memory_stats()
    print(text, flush=True)


def whole_step(policy: Policy, batch) -> tuple[Callable[[], None], Optimizer]:
    """What computes the gradients of a step, and the optimizer that takes it."""
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-6))
    wanted = batch.positions > 0

    def gradients() -> None:
        optimizer.zero_grad()
        policy.run([batch], [wanted], lambda _, out: -out.logprobs.mean())

    return gradients, optimizer


def with_optimizer(policy: Policy, batch, repeats: int, flops: float) -> None:
    """Whole steps, then the optimizer's part of them."""
    gradients, optimizer = whole_step(policy, batch)

    def step() -> None:
        gradients()
        optimizer.step()

    show("whole step", timed(step, repeats), flops)
    alone = []
    for _ in range(repeats):
        gradients()
        synchronize()
        begin = time.perf_counter()
        optimizer.step()
        synchronize()
        alone.append(time.perf_counter() - begin)
    show("optimizer alone", alone, 0.0)


def an_expert_a_module(config: dict, lengths: list[int], repeats: int, flops: float) -> None:
    """The decoder alone with Megatron's own experts, and with the stacked ones."""
    from vime_trainer.megatron._layout import layout_of

    parsed = models.HfConfig(config)
    arch = models.family_of(parsed).architecture(parsed)
    plug_in = _transformer_engine._plug_into_local
    batch = make_batch(config, lengths)
    layout = layout_of(batch.lengths, torch.device("cpu"), dense=True)

    def keep_experts(block, parts) -> None:
        found = [spec.submodules.mlp.submodules.experts for spec in block.layer_specs]
        plug_in(block, parts)
        for spec, kept in zip(block.layer_specs, found, strict=True):
            spec.submodules.mlp.submodules.experts = kept

    for name, way in (("stacked experts, decoder alone", plug_in), ("a module an expert, decoder alone", keep_experts)):
        _transformer_engine._plug_into_local = way
        try:
            model = build_model(arch, transformer_engine="off")
        finally:
            _transformer_engine._plug_into_local = plug_in
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.02)

        def run(model=model) -> None:
            model(batch.tokens, batch.positions, layout).square().sum().backward()

        show(name, timed(run, repeats), flops)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--experts", action="store_true")
    args = parser.parse_args()
    config, dtype, lengths = SHAPES[args.shape]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(
        f"{args.shape} on {where}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    flops = step_flops(config, dtype, lengths)
    batch = make_batch(config, lengths)
    names = [field.name for field in fields(Switches) if field.name not in ("adam", "experts")]
    for label, off in [
        ("all fast ways", ()),
        *((f"without {name}", (name,)) for name in names),
        ("none", tuple(names)),
    ]:
        with without(*off):
            show(f"passes, {label}", timed(passes(build(config, dtype), batch), args.repeats), flops)
    if args.optimizer:
        with_optimizer(build(config, dtype), batch, args.repeats, flops)
    if args.experts and args.shape == "demo":
        an_expert_a_module(config, lengths, args.repeats, flops)


if __name__ == "__main__":
    main()
