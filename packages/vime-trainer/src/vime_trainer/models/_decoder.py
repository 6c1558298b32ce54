"""The rows and sizes that the families share: one pre-norm decoder whose parts are there or not."""

from __future__ import annotations

from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._rules import EXPERT_DOWN, EXPERT_GATE_UP, GATE_UP, QKV
from vime_trainer.models._weights import HfTensor, Weight

__all__ = ["ATTENTION", "DENSE", "ENDS", "ROUTED", "SHARED", "sizes"]

_HF, _MG = "model.layers.{layer}.", "decoder.layers.{layer}."
_EXPERT = _HF + "mlp.experts.{expert}."

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
ROUTED = (
    Weight(_MG + "mlp.router.weight", (HfTensor(_HF + "mlp.gate.weight", "experts hidden"),), where="moe"),
    Weight(
        _MG + "mlp.router.expert_bias",
        (HfTensor(_HF + "mlp.gate.e_score_correction_bias", "experts"),),
        where="moe",
        needs="expert_bias",
        float32=True,
    ),
    Weight(
        _MG + "mlp.experts.fc1",
        (
            HfTensor(_EXPERT + "gate_proj.weight", "expert_ffn hidden"),
            HfTensor(_EXPERT + "up_proj.weight", "expert_ffn hidden"),
        ),
        EXPERT_GATE_UP,
        cut="columns",
        where="moe",
    ),
    Weight(
        _MG + "mlp.experts.fc2",
        (HfTensor(_EXPERT + "down_proj.weight", "hidden expert_ffn"),),
        EXPERT_DOWN,
        cut="rows",
        where="moe",
    ),
)
SHARED = (
    Weight(
        _MG + "mlp.shared_experts.linear_fc1.weight",
        (
            HfTensor(_HF + "mlp.shared_experts.gate_proj.weight", "shared_ffn hidden"),
            HfTensor(_HF + "mlp.shared_experts.up_proj.weight", "shared_ffn hidden"),
        ),
        GATE_UP,
        cut="columns",
        where="moe",
        needs="shared_ffn",
    ),
    Weight(
        _MG + "mlp.shared_experts.linear_fc2.weight",
        (HfTensor(_HF + "mlp.shared_experts.down_proj.weight", "hidden shared_ffn"),),
        cut="rows",
        where="moe",
        needs="shared_ffn",
    ),
)


def sizes(config: HfConfig, norm_eps: float) -> dict[str, object]:
    """Arguments of Architecture that every family has.

    Args:
        config: of a model with gated SiLU and no dropout.
        norm_eps: the family's, where the file does not say.

    Raises:
        ValueError: a key is missing, or asks for something else.
    """
    config.demand("hidden_act", "silu")
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
        "norm_eps": config.get("rms_norm_eps", default=norm_eps),
        "rope_theta": config.rope_theta(),
        "max_positions": config.get("max_position_embeddings", default=32768),
        "init_std": config.get("initializer_range", default=0.02),
    }
