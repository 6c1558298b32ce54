"""What is measured: shapes of the two models, and how much is generated. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MODELS", "Size", "model_config", "size"]

MODELS = ("moe", "dense")
"""A mixture of experts, and a dense model whose feed-forward part is as wide as the experts that a token uses."""


@dataclass(frozen=True)
class Size:
    """One size of the study.

    Attributes:
        prompts, prompt_tokens, new_tokens: what an engine generates from, and how much for each prompt.
        scored: sequences on which variants of the trainer are compared.
        std: standard deviation of the random weights, unless another is asked for.
        cache_gib: memory of an engine's key-value cache.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    scored: int
    std: float
    cache_gib: float
    vocabulary: int
    hidden: int
    layers: int
    experts: int
    top_k: int
    width: int
    heads: int
    groups: int
    head_dim: int


_FULL = Size(256, 128, 512, 64, 0.02, 12.0, 32768, 1024, 16, 64, 8, 512, 16, 8, 128)
_TINY = Size(8, 8, 24, 4, 0.15, 0.25, 256, 64, 4, 16, 4, 48, 4, 2, 32)


def size(tiny: bool) -> Size:
    """The size that figures are given for, or one that shows in a minute on a CPU that everything runs."""
    return _TINY if tiny else _FULL


def model_config(name: str, of: Size) -> dict[str, Any]:
    """config.json of a model in Hugging Face's form: Qwen3-MoE, or dense Qwen3."""
    common = {
        "vocab_size": of.vocabulary,
        "hidden_size": of.hidden,
        "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.groups,
        "head_dim": of.head_dim,
        "intermediate_size": of.top_k * of.width,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_sliding_window": False,
    }
    if name == "dense":
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": of.experts,
        "num_experts_per_tok": of.top_k,
        "moe_intermediate_size": of.width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        **common,
    }
