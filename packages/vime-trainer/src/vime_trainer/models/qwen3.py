"""Qwen3, dense (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._family import Family
from vime_trainer.models._rules import GATE_UP, QKV
from vime_trainer.models._weights import HfTensor, Weight

__all__ = ["ATTENTION", "DENSE", "ENDS", "FAMILY", "common"]

_HF, _MG = "model.layers.{layer}.", "decoder.layers.{layer}."

ENDS = (
    Weight(
        "embedding.word_embeddings.weight",
        (HfTensor("model.embed_tokens.weight", "vocab hidden"),),
        cut="vocabulary",
        where="once",
    ),
    Weight("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", "hidden"),), where="once"),
    Weight("output_layer.weight", (HfTensor("lm_head.weight", "vocab hidden"),), cut="vocabulary", where="untied"),
)
ATTENTION = (
    Weight(_MG + "input_layernorm.weight", (HfTensor(_HF + "input_layernorm.weight", "hidden"),)),
    Weight(
        _MG + "self_attention.linear_qkv.weight",
        (
            HfTensor(_HF + "self_attn.q_proj.weight", "queries hidden"),
            HfTensor(_HF + "self_attn.k_proj.weight", "keys hidden"),
            HfTensor(_HF + "self_attn.v_proj.weight", "keys hidden"),
        ),
        QKV,
        cut="columns",
    ),
    Weight(
        _MG + "self_attention.linear_qkv.bias",
        (
            HfTensor(_HF + "self_attn.q_proj.bias", "queries"),
            HfTensor(_HF + "self_attn.k_proj.bias", "keys"),
            HfTensor(_HF + "self_attn.v_proj.bias", "keys"),
        ),
        QKV,
        cut="columns",
        needs="qkv_bias",
    ),
    Weight(
        _MG + "self_attention.q_layernorm.weight",
        (HfTensor(_HF + "self_attn.q_norm.weight", "head_dim"),),
        needs="qk_norm",
    ),
    Weight(
        _MG + "self_attention.k_layernorm.weight",
        (HfTensor(_HF + "self_attn.k_norm.weight", "head_dim"),),
        needs="qk_norm",
    ),
    Weight(
        _MG + "self_attention.linear_proj.weight",
        (HfTensor(_HF + "self_attn.o_proj.weight", "hidden queries"),),
        cut="rows",
    ),
    Weight(_MG + "pre_mlp_layernorm.weight", (HfTensor(_HF + "post_attention_layernorm.weight", "hidden"),)),
)
DENSE = (
    Weight(
        _MG + "mlp.linear_fc1.weight",
        (HfTensor(_HF + "mlp.gate_proj.weight", "ffn hidden"), HfTensor(_HF + "mlp.up_proj.weight", "ffn hidden")),
        GATE_UP,
        cut="columns",
        where="dense",
    ),
    Weight(
        _MG + "mlp.linear_fc2.weight",
        (HfTensor(_HF + "mlp.down_proj.weight", "hidden ffn"),),
        cut="rows",
        where="dense",
    ),
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
