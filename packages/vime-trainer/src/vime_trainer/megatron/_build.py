"""Builds Megatron's GPTModel for an architecture: local layer spec with our core attention and experts."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vime_trainer.fused import switches
from vime_trainer.megatron import _parallel, _seams
from vime_trainer.models import Architecture

__all__ = ["build_model", "head_weight", "routers", "weights"]


def build_model(arch: Architecture, dtype: torch.dtype = torch.float32, recompute: bool = False) -> Any:
    """A PackedGPT with uninitialised weights on this process's device.

    Args:
        arch: sizes.
        dtype: of the weights and activations.
        recompute: keep only each layer's input and compute the layer again in the backward pass.
    """
    _parallel.initialize()
    with warnings.catch_warnings(), _seams.cuda_names():
        warnings.simplefilter("ignore")  # about Apex, Transformer Engine and fused kernels that are not used here
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        from vime_trainer.megatron._dispatch import use_gathers
        from vime_trainer.megatron._model import PackedGPT
        from vime_trainer.megatron._moe import sum_in_float32

        config = _transformer_config(arch, dtype, recompute)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        _plug_in(spec.layer_specs)
        model = PackedGPT(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=arch.vocab,
            max_sequence_length=arch.max_positions,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            rotary_percent=arch.rotary_fraction,
        )
    use_gathers(model)
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "router"):
            sum_in_float32(layer.mlp)
    model.to(device=_seams.device(), dtype=dtype)
    for router in routers(model).values():
        if router.expert_bias is not None:
            router.expert_bias = router.expert_bias.float()  # the choice of experts hangs on its last bits
    return model


def head_weight(model: Any) -> Tensor:
    """The output head, [vocab, hidden]; the embedding itself when they are tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def routers(model: Any) -> dict[int, Any]:
    """TopKRouter modules by global layer number, counted from 0 over all decoder layers."""
    return {layer.layer_number - 1: layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")}


def weights(model: Any) -> dict[str, Tensor]:
    """Parameters and the routers' expert biases by Megatron's name, tied parameters once."""
    biases = {name: value for name, value in model.named_buffers() if name.endswith("router.expert_bias")}
    return {**dict(model.named_parameters()), **biases}


def _transformer_config(arch: Architecture, dtype: torch.dtype, recompute: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    moe: dict[str, Any] = {}
    if arch.moe_layers:
        moe = {
            "num_moe_experts": arch.experts,
            "moe_layer_freq": [int(layer in arch.moe_layers) for layer in range(arch.layers)],
            "moe_ffn_hidden_size": arch.expert_ffn,
            "moe_router_topk": arch.top_k,
            "moe_router_pre_softmax": not arch.renormalise and not arch.sigmoid,
            "moe_router_score_function": "sigmoid" if arch.sigmoid else "softmax",
            # Such models are trained and served with their scores in float32.
            "moe_router_dtype": "fp32" if arch.sigmoid else None,
            "moe_router_topk_scaling_factor": arch.routed_scaling if arch.routed_scaling != 1.0 else None,
            "moe_router_enable_expert_bias": arch.expert_bias,
            # By default Megatron moves the bias with every optimizer step; what it chooses by must be what engines choose by.
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    if recompute:
        moe |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        bias_activation_fusion=switches.swiglu and torch.cuda.is_available(),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        # Losses carry their global denominator, so data parallelism adds gradients and averages nothing.
        calculate_per_token_loss=True,
        **moe,
    )


def _plug_in(layer_specs: list[Any]) -> None:
    """Puts our attention and experts into the layer specs, in place."""
    from vime_trainer.megatron._attention import PackedAttention
    from vime_trainer.megatron._experts import StackedExperts
    from vime_trainer.megatron._moe import Float32GateRouter

    for spec in layer_specs:
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        mlp = spec.submodules.mlp.submodules
        if hasattr(mlp, "experts"):
            mlp.experts, mlp.router = StackedExperts, Float32GateRouter
