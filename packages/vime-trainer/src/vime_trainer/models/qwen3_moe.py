"""Qwen3 with routed experts (https://arxiv.org/abs/2505.09388): softmax scores, top-k, no shared expert."""

from __future__ import annotations

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._family import Family
from vime_trainer.models._rules import EXPERT_DOWN, EXPERT_GATE_UP
from vime_trainer.models._weights import HfTensor, Weight
from vime_trainer.models.qwen3 import ATTENTION, DENSE, ENDS, common

__all__ = ["FAMILY", "ROUTED"]

_HF, _MG = "model.layers.{layer}.mlp.", "decoder.layers.{layer}.mlp."
_EXPERT = _HF + "experts.{expert}."

ROUTED = (
    Weight(_MG + "router.weight", (HfTensor(_HF + "gate.weight", "experts hidden"),), where="moe"),
    Weight(
        _MG + "experts.fc1",
        (
            HfTensor(_EXPERT + "gate_proj.weight", "expert_ffn hidden"),
            HfTensor(_EXPERT + "up_proj.weight", "expert_ffn hidden"),
        ),
        EXPERT_GATE_UP,
        cut="columns",
        where="moe",
    ),
    Weight(
        _MG + "experts.fc2",
        (HfTensor(_EXPERT + "down_proj.weight", "hidden expert_ffn"),),
        EXPERT_DOWN,
        cut="rows",
        where="moe",
    ),
)


def _architecture(config: HfConfig) -> Architecture:
    layers = config.get("num_hidden_layers")
    experts = config.get("num_local_experts", "num_experts")
    step, dense = config.get("decoder_sparse_step", default=1), config.get("mlp_only_layers", default=[])
    return Architecture(
        **common(config),  # type: ignore[arg-type]
        experts=experts,
        top_k=config.get("num_experts_per_tok"),
        expert_ffn=config.get("moe_intermediate_size"),
        renormalise=config.get("norm_topk_prob", default=False),
        moe_layers=frozenset(i for i in range(layers) if experts and i not in dense and (i + 1) % step == 0),
    )


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _architecture, (*ENDS, *ATTENTION, *DENSE, *ROUTED))
