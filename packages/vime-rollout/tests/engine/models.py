"""Tiny random models in Hugging Face folders, made by code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB = 64
EOS = 2


def config(moe: bool = False, tied: bool = False, layers: int = 2) -> dict:
    """config.json of a Qwen3 or Qwen3-MoE model."""
    shared = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": EOS, "torch_dtype": "float32",
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_sliding_window": False,
    }  # fmt: skip
    if not moe:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **shared}
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **shared,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [0], "router_aux_loss_coef": 0.0,
    }  # fmt: skip


def glm(layers: int = 3) -> dict:
    """config.json of a GLM-4.5 model: one dense layer, then two with a bias of the choice of experts and a shared expert."""
    return {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": VOCAB, "hidden_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5, "hidden_act": "silu", "attention_bias": True, "use_qk_norm": True,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": EOS, "torch_dtype": "float32",
        "attention_dropout": 0.0, "initializer_range": 0.02, "first_k_dense_replace": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def weights(cfg: dict, seed: int) -> dict[str, np.ndarray]:
    """Random float32 weights, large enough that the model's choices are not all ties."""
    rng = np.random.default_rng(seed)
    hidden, heads, kv, dim = cfg["hidden_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"]

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1]) * 1.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(cfg["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    if not cfg["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(cfg["vocab_size"], hidden)
    experts = cfg.get("num_experts", cfg.get("n_routed_experts", 0))
    dense = cfg.get("mlp_only_layers", range(cfg.get("first_k_dense_replace", 0)))
    for number in range(cfg["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        tensors[layer + "input_layernorm.weight"] = norm(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = norm(hidden)
        attention = layer + "self_attn."
        tensors[attention + "q_proj.weight"] = matrix(heads * dim, hidden)
        tensors[attention + "k_proj.weight"] = matrix(kv * dim, hidden)
        tensors[attention + "v_proj.weight"] = matrix(kv * dim, hidden)
        tensors[attention + "o_proj.weight"] = matrix(hidden, heads * dim)
        tensors[attention + "q_norm.weight"] = norm(dim)
        tensors[attention + "k_norm.weight"] = norm(dim)
        if cfg["attention_bias"]:
            for one, size in (("q", heads), ("k", kv), ("v", kv)):
                tensors[f"{attention}{one}_proj.bias"] = norm(size * dim) - 1
        if experts and number not in dense:
            tensors[layer + "mlp.gate.weight"] = matrix(experts, hidden)
            homes = [(f"{layer}mlp.experts.{e}.", cfg["moe_intermediate_size"]) for e in range(experts)]
            if "n_shared_experts" in cfg:
                # Large enough to change the choice.
                tensors[layer + "mlp.gate.e_score_correction_bias"] = 2 * (norm(experts) - 1)
                homes.append((f"{layer}mlp.shared_experts.", cfg["moe_intermediate_size"] * cfg["n_shared_experts"]))
        else:
            homes = [(layer + "mlp.", cfg["intermediate_size"])]
        for home, width in homes:
            tensors[home + "gate_proj.weight"] = matrix(width, hidden)
            tensors[home + "up_proj.weight"] = matrix(width, hidden)
            tensors[home + "down_proj.weight"] = matrix(hidden, width)
    return tensors


def save(folder: Path, cfg: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
