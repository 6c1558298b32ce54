"""One optimizer step of a tiny Qwen3-MoE: 256 rows of 11 tokens, our stacked experts against Megatron's one module an expert.

python benchmarks/bench_model_step.py [REPEATS]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from vime_trainer.megatron import _build
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.policy import Policy

CONFIG = {
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


def policy_step(config: Path):
    """A full step through the public interface."""
    policy = Policy.from_config(config)
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-3))
    batch = pack([torch.randint(0, 32, (11,)) for _ in range(256)])
    wanted = batch.positions > 6

    def step() -> None:
        optimizer.zero_grad()
        (-policy(batch, wanted).logprobs.sum() / 1024).backward()
        optimizer.step()

    return step


def passes(config: Path, stacked: bool):
    """Forward and backward of the decoder alone, with either kind of experts; their weights are random."""
    from vime_trainer import models
    from vime_trainer.megatron._layout import layout_of

    plug_in = _build._plug_in

    def attention_only(specs):
        experts = [spec.submodules.mlp.submodules.experts for spec in specs]
        plug_in(specs)
        for spec, kept in zip(specs, experts, strict=True):
            spec.submodules.mlp.submodules.experts = kept

    _build._plug_in = plug_in if stacked else attention_only
    try:
        parsed = models.read_config(config)
        model = _build.build_model(models.family_of(parsed).architecture(parsed))
    finally:
        _build._plug_in = plug_in
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    batch = pack([torch.randint(0, 32, (11,)) for _ in range(256)])
    layout = layout_of(batch.lengths, batch.cu_seqlens, dense=True)
    return lambda: model(batch.tokens, batch.positions, layout).square().sum().backward()


def timed(run, repeats: int) -> str:
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return f"{min(seconds) * 1e3:.1f} ms best, {statistics.median(seconds) * 1e3:.1f} ms median of {repeats}"


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(platform.machine(), os.cpu_count(), "cores,", torch.get_num_threads(), "threads, torch", torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        print("whole step:               ", timed(policy_step(config), repeats))
        print("passes, stacked experts:  ", timed(passes(config, True), repeats))
        print("passes, a module an expert:", timed(passes(config, False), repeats))


if __name__ == "__main__":
    main()
