"""Qwen3, dense (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._family import Family
from vime_trainer.models._rules import GATE_UP, QKV
from vime_trainer.models._weights import Weight

__all__ = ["ATTENTION", "DENSE", "ENDS", "FAMILY", "common"]

_HF, _MG = "model.layers.{layer}.", "decoder.layers.{layer}."

ENDS = (
    Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), where="once"),
    Weight("decoder.final_layernorm.weight", ("model.norm.weight",), where="once"),
    Weight("output_layer.weight", ("lm_head.weight",), where="untied"),
)
ATTENTION = (
    Weight(_MG + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    Weight(
        _MG + "self_attention.linear_qkv.weight",
        tuple(f"{_HF}self_attn.{part}_proj.weight" for part in "qkv"),
        QKV,
    ),
    Weight(_MG + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",)),
    Weight(_MG + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",)),
    Weight(_MG + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",)),
    Weight(_MG + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
)
DENSE = (
    Weight(
        _MG + "mlp.linear_fc1.weight",
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        GATE_UP,
        where="dense",
    ),
    Weight(_MG + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), where="dense"),
)


def common(config: HfConfig) -> dict[str, object]:
    """What dense and MoE models share.

    Raises:
        ValueError: a key is missing or asks for something else than Qwen3.
    """
    config.demand("hidden_act", "silu")
    config.demand("use_sliding_window", False)
    config.demand("attention_bias", False)
    config.demand("attention_dropout", 0.0)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    return {
        "layers": config.get("num_hidden_layers"),
        "hidden": hidden,
        "vocab": config.get("vocab_size"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", default=heads),
        "head_dim": config.get("head_dim", default=hidden // heads),
        "ffn": config.get("intermediate_size"),
        "tied": config.get("tie_word_embeddings", default=False),
        "norm_eps": config.get("rms_norm_eps", default=1e-6),
        "rope_theta": config.rope_theta(),
        "max_positions": config.get("max_position_embeddings", default=32768),
        "init_std": config.get("initializer_range", default=0.02),
    }


def _architecture(config: HfConfig) -> Architecture:
    return Architecture(**common(config))  # type: ignore[arg-type]


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _architecture, (*ENDS, *ATTENTION, *DENSE))
