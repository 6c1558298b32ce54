"""Builds Megatron's GPTModel for an architecture, from its local layers or from Transformer Engine's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vime_trainer.fused import switches
from vime_trainer.megatron import _parallel, _seams
from vime_trainer.megatron._transformer_engine import (
    TransformerEngine,
    block_spec,
    keeps_experts,
    wants_transformer_engine,
)
from vime_trainer.models import Architecture, check_place, padded_vocab
from vime_trainer.settings.parallel import ParallelConfig

__all__ = ["build_chunks", "build_model", "head_weight", "routers", "weights"]


def build_chunks(
    arch: Architecture,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    transformer_engine: TransformerEngine = "auto",
) -> list[Any]:
    """This rank's part of the model: one PackedGPT, or one for each virtual pipeline stage. Collective.

    Args:
        arch: sizes.
        dtype: of the weights and activations.
        recompute: keep only each layer's input and compute the layer again in the backward pass.
        transformer_engine: whether its layers are taken, see `wants_transformer_engine`.

    Raises:
        ValueError: a layout that does not fit the model, or Transformer Engine asked for where it cannot be used; names
            the field.
    """
    te = wants_transformer_engine(transformer_engine, dtype, bool(arch.moe_layers), torch.cuda.is_available())
    here = _parallel.parallel()
    here.config.split_layers(arch.layers)
    check_place(arch, here.place)
    if arch.moe_layers and here.tensor_size > 1 and not here.config.sequence:
        raise ValueError("parallel.sequence: Megatron's MoE layers need it when parallel.tensor is more than 1")
    count = here.config.virtual
    return [build_chunk(arch, dtype, recompute, te, stage if count > 1 else None) for stage in range(count)]


def build_model(
    arch: Architecture,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    transformer_engine: TransformerEngine = "auto",
) -> Any:
    """The one chunk of a model without virtual stages; see `build_chunks`."""
    (model,) = build_chunks(arch, dtype, recompute, transformer_engine)
    return model


def build_chunk(arch: Architecture, dtype: torch.dtype, recompute: bool, te: bool, stage: int | None = None) -> Any:
    """A PackedGPT with uninitialised weights on this process's device.

    Args:
        arch, dtype, recompute: as in `build_chunks`.
        te: build it from Transformer Engine's layers, which is what the model's `transformer_engine` says afterwards.
        stage: number of the virtual pipeline stage; None without them.
    """
    here = _parallel.parallel()
    first = here.pipeline_rank == 0 and not stage
    last = here.is_last_stage and (stage is None or stage == here.config.virtual - 1)
    with warnings.catch_warnings(), _seams.cuda_names():
        warnings.simplefilter("ignore")  # about Apex, Transformer Engine and fused kernels that are not used here
        from vime_trainer.megatron._cut import mark_cut_weights
        from vime_trainer.megatron._dispatch import use_gathers
        from vime_trainer.megatron._model import PackedGPT
        from vime_trainer.megatron._moe import sum_in_float32

        config = _transformer_config(arch, dtype, recompute, te)
        model = PackedGPT(
            config=config,
            transformer_layer_spec=block_spec(config, stage, te),
            vocab_size=padded_vocab(arch.vocab, here.tensor_size),
            max_sequence_length=arch.max_positions,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            vp_stage=stage,
            rotary_percent=arch.rotary_fraction,
        )
    model.transformer_engine = te
    mark_cut_weights(model)
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


def _transformer_config(arch: Architecture, dtype: torch.dtype, recompute: bool, te: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    here, gpu = _parallel.parallel(), torch.cuda.is_available()
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
            "moe_token_dispatcher_type": "alltoall" if gpu and here.expert_size > 1 else "allgather",
            "moe_grouped_gemm": te and keeps_experts(arch.hidden, arch.expert_ffn, here.expert_tensor_size),
        }
    if recompute:
        moe |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        tensor_model_parallel_size=here.tensor_size,
        sequence_parallel=here.config.shares_tokens,
        pipeline_model_parallel_size=here.pipeline_size,
        virtual_pipeline_model_parallel_size=here.config.virtual if here.config.virtual > 1 else None,
        context_parallel_size=here.context_size,
        expert_model_parallel_size=here.expert_size,
        expert_tensor_parallel_size=here.expert_tensor_size,
        pipeline_model_parallel_layout=_stages(arch.layers, here.config),
        batch_p2p_comm=gpu and not (here.pipeline_size == 2 and here.config.virtual > 1),
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
    # Stages exchange batches of any length. The check of the config forbids it with the all-gather dispatcher, whose
    # ranks must agree on the length; the policy pads batches so that they do.
    # With virtual stages lengths are equal: of two stages each is before and after the other, and lengths would be mixed up.
    config.variable_seq_lengths = here.pipeline_size > 1 and here.config.virtual == 1
    return config


def _stages(layers: int, sizes: ParallelConfig) -> list[list[str]] | None:
    """Megatron's list of what each chunk has, where chunks differ; by default it divides layers equally."""
    split = sizes.split_layers(layers)
    if len(set(split)) == 1:
        return None
    chunks = [["decoder"] * count for count in split]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]
