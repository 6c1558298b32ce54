"""Qwen3 with routed experts (https://arxiv.org/abs/2505.09388): softmax scores, top-k, no shared expert."""

from __future__ import annotations

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._decoder import ATTENTION, DENSE, ENDS, ROUTED
from vime_trainer.models._family import Family
from vime_trainer.models.qwen3 import qwen3_sizes

__all__ = ["FAMILY"]


def _architecture(config: HfConfig) -> Architecture:
    layers = config.get("num_hidden_layers")
    experts = config.get("num_local_experts", "num_experts")
    step, dense = config.get("decoder_sparse_step", default=1), config.get("mlp_only_layers", default=[])
    return Architecture(
        **qwen3_sizes(config),  # type: ignore[arg-type]
        experts=experts,
        top_k=config.get("num_experts_per_tok"),
        expert_ffn=config.get("moe_intermediate_size"),
        renormalise=config.get("norm_topk_prob", default=False),
        moe_layers=frozenset(i for i in range(layers) if experts and i not in dense and (i + 1) % step == 0),
    )


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _architecture, (*ENDS, *ATTENTION, *DENSE, *ROUTED))
