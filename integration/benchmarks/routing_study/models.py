"""Writes random bfloat16 models and random prompts: `python models.py --work DIR`, by the trainer's interpreter."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import say
from safetensors.torch import save_file
from shapes import MODELS, model_config, size
from torch import Tensor


def random_weights(config: dict[str, Any], std: float) -> dict[str, Tensor]:
    """Every tensor under Hugging Face's names: normal with this standard deviation, norms one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).bfloat16().cpu()

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    hidden, head_dim, vocabulary = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {
        "model.embed_tokens.weight": normal(vocabulary, hidden),
        "lm_head.weight": normal(vocabulary, hidden),
        "model.norm.weight": ones(hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        weights |= {
            f"{layer}input_layernorm.weight": ones(hidden),
            f"{layer}post_attention_layernorm.weight": ones(hidden),
            f"{layer}self_attn.q_norm.weight": ones(head_dim),
            f"{layer}self_attn.k_norm.weight": ones(head_dim),
            f"{layer}self_attn.q_proj.weight": normal(queries, hidden),
            f"{layer}self_attn.k_proj.weight": normal(keys, hidden),
            f"{layer}self_attn.v_proj.weight": normal(keys, hidden),
            f"{layer}self_attn.o_proj.weight": normal(hidden, queries),
        }
        width, homes = config["intermediate_size"], [f"{layer}mlp."]
        if "num_experts" in config:
            weights[f"{layer}mlp.gate.weight"] = normal(config["num_experts"], hidden)
            width = config["moe_intermediate_size"]
            homes = [f"{layer}mlp.experts.{expert}." for expert in range(config["num_experts"])]
        for home in homes:
            weights |= {
                f"{home}gate_proj.weight": normal(width, hidden),
                f"{home}up_proj.weight": normal(width, hidden),
                f"{home}down_proj.weight": normal(hidden, width),
            }
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--std", type=float)
    options = parser.parse_args()
    of = size(options.tiny)
    std = of.std if options.std is None else options.std
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    say(device=device, torch=torch.__version__, std=std)
    for name in MODELS:
        folder = options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        config = model_config(name, of)
        weights = random_weights(config, std)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        say(model=name, parameters=sum(tensor.numel() for tensor in weights.values()))
    random = np.random.default_rng(0)
    for name in ("prompts", "warm"):
        np.savez(
            options.work / f"{name}.npz", prompts=random.integers(3, of.vocabulary, (of.prompts, of.prompt_tokens))
        )


if __name__ == "__main__":
    main()
