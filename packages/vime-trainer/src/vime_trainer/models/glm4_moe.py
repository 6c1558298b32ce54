"""GLM-4.5 (https://arxiv.org/abs/2508.06471): dense first layers, sigmoid scores, a bias for the choice, shared experts.

The layers for multi-token prediction that a folder holds behind the last layer are not part of the model here: they are
ignored on load, and an exported folder says that it has none.
"""

from __future__ import annotations

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._decoder import ATTENTION, DENSE, ENDS, ROUTED, SHARED, sizes
from vime_trainer.models._family import Family

__all__ = ["FAMILY"]


def _architecture(config: HfConfig) -> Architecture:
    config.demand("n_group", 1)
    config.demand("topk_group", 1)
    top_k = config.get("num_experts_per_tok")
    # With one expert a token its weight is the plain score; Megatron normalises exactly when there are several.
    config.demand("norm_topk_prob", top_k > 1)
    width = config.get("moe_intermediate_size")
    layers = config.get("num_hidden_layers")
    return Architecture(
        **sizes(config, norm_eps=1e-5),  # type: ignore[arg-type]
        qk_norm=config.get("use_qk_norm", default=False),
        qkv_bias=config.get("attention_bias", default=False),
        rotary_fraction=config.rotary_fraction(default=0.5),
        experts=config.get("n_routed_experts", "num_local_experts"),
        top_k=top_k,
        expert_ffn=width,
        shared_ffn=width * config.get("n_shared_experts", default=1),
        sigmoid=True,
        expert_bias=True,
        routed_scaling=config.get("routed_scaling_factor", default=1.0),
        moe_layers=frozenset(range(config.get("first_k_dense_replace", default=1), layers)),
        mtp_layers=config.get("num_nextn_predict_layers", "num_mtp_layers", default=0),
    )


FAMILY = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    _architecture,
    (*ENDS, *ATTENTION, *DENSE, *ROUTED, *SHARED),
    exported={"num_nextn_predict_layers": 0, "num_mtp_layers": 0},
)
