"""Whether a model is built from Transformer Engine's layers, and Megatron's block specification for either kind."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, Literal

import torch

from vime_proto.errors import nearest
from vime_trainer.fused import switches
from vime_trainer.megatron._alignment import check_grouped_experts

__all__ = ["TransformerEngine", "block_spec", "keeps_experts", "wants_transformer_engine", "why_missing"]

TransformerEngine = Literal["auto", "on", "off"]


def wants_transformer_engine(choice: TransformerEngine, dtype: torch.dtype, experts: bool, gpu: bool) -> bool:
    """Whether a model of this process is built from Transformer Engine's layers.

    "auto" takes it for bfloat16 models without experts, on a GPU where it can be imported: with experts it was not faster
    than the local layers, and its matrix products of float32 are computed in TF32, which is not what a float32 model is for.

    Args:
        choice: the key `transformer_engine` of a run.
        dtype: of weights and activations.
        experts: whether any layer of the model has routed experts.
        gpu: whether this process has one.

    Raises:
        ValueError: "on" where it cannot be used; names what is missing.
    """
    if choice not in ("auto", "on", "off"):
        raise ValueError(f"transformer_engine: {nearest(choice, ['auto', 'on', 'off'])}")
    if choice == "off" or (choice == "auto" and (experts or not gpu or dtype != torch.bfloat16)):
        return False
    if not gpu:
        raise ValueError('transformer_engine: "on" needs a GPU, and this process has none; valid here: "auto", "off"')
    missing = why_missing()
    if missing is None:
        return True
    if choice == "on":
        raise ValueError(
            'transformer_engine: "on" needs the package transformer-engine[pytorch]: '
            f'{missing}; valid without it: "auto", "off"'
        )
    if not missing.startswith("No module named 'transformer_engine'"):
        warnings.warn(f"transformer_engine: not used although installed: {missing}", RuntimeWarning, stacklevel=2)
    return False


@functools.cache
def why_missing() -> str | None:
    """Why Transformer Engine cannot be used; None where it can."""
    for module in ("transformer_engine", "transformer_engine.pytorch"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its own internals
                importlib.import_module(module)
        # It loads shared libraries, and checks versions by assertions.
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            return str(error) or repr(error)
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        return "megatron-core cannot import what it needs of this version of Transformer Engine"
    return None


def keeps_experts(hidden: int, width: int, expert_tensor: int) -> bool:
    """Whether a model of Transformer Engine's layers has its experts too, instead of the stacked ones.

    Args:
        hidden, width, expert_tensor: as in `check_grouped_experts`.
    """
    if not switches.experts:
        return True
    try:
        check_grouped_experts(hidden, width, expert_tensor)
    except ValueError:
        return True
    return False


def block_spec(config: Any, stage: int | None, te: bool) -> Any:
    """Megatron's layers for a chunk, with our parts where theirs do not serve.

    Args:
        config: Megatron's TransformerConfig.
        stage: number of the virtual pipeline stage; None without them.
        te: take Transformer Engine's layers.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from vime_trainer.megatron._moe import Float32GateRouter

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=stage)
    (_plug_into_te if te else _plug_into_local)(block, config)
    for spec in block.layer_specs:
        mlp = spec.submodules.mlp.submodules
        if hasattr(mlp, "experts"):
            mlp.router = Float32GateRouter
    return block


def _plug_into_te(block: Any, config: Any) -> None:
    """Its norms and matrices stay; its attention gets turned queries and keys, or makes room for ours."""
    from vime_trainer.megatron._attention import PackedAttention
    from vime_trainer.megatron._experts import StackedExperts
    from vime_trainer.megatron._te_attention import TeAttention

    # Under context parallelism its attention wants every sequence padded and cut; ours takes batches as they are cut here.
    ours = config.context_parallel_size > 1 or config.params_dtype == torch.float32
    for spec in block.layer_specs:
        spec.submodules.self_attention.submodules.core_attention = PackedAttention if ours else TeAttention
        if hasattr(spec.submodules.mlp.submodules, "experts") and not config.moe_grouped_gemm:
            spec.submodules.mlp.submodules.experts = StackedExperts


def _plug_into_local(block: Any, config: Any) -> None:
    """Attention, experts and norms are ours."""
    from megatron.core.transformer.identity_op import IdentityOp

    from vime_trainer.megatron._attention import PackedAttention
    from vime_trainer.megatron._experts import StackedExperts
    from vime_trainer.megatron._norm import RMSNorm

    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(parts.self_attention.submodules, name) is not IdentityOp:
                setattr(parts.self_attention.submodules, name, RMSNorm)
        parts.self_attention.submodules.core_attention = PackedAttention
        if hasattr(parts.mlp.submodules, "experts"):
            parts.mlp.submodules.experts = StackedExperts
