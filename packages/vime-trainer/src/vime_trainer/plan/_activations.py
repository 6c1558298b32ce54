"""Bytes that the forward pass keeps for the backward pass, tensor by tensor as this trainer's layers keep them."""

from __future__ import annotations

from dataclasses import dataclass

from vime_trainer.models import Architecture
from vime_trainer.plan._layout import Layout

__all__ = ["GPU_KERNELS", "Kernels", "Tokens", "layer_bytes", "layer_input_bytes", "outer_bytes"]

_FLOAT, _INT = 4, 8


@dataclass(frozen=True)
class Kernels:
    """Ways of computing that differ in what they keep.

    Attributes:
        fused_mlp: gate and up in one kernel: keeps its input alone.
        fused_rope: sines and cosines once a pass instead of in every layer.
        fused_norm: keeps its input alone; otherwise a float32 copy of it and the normalised values.
        grouped_attention: takes fewer key and value heads as they are; otherwise keeps them repeated for every query head.
    """

    fused_mlp: bool = True
    fused_rope: bool = True
    fused_norm: bool = True
    grouped_attention: bool = True


GPU_KERNELS = Kernels()
"""bfloat16 on a GPU."""


@dataclass(frozen=True)
class Tokens:
    """Of one micro-batch on one GPU.

    Attributes:
        whole: of the micro-batch.
        here: of this context-parallel rank.
        shared: of this tensor-parallel rank, where ranks share what lies between matrices.
    """

    whole: int
    here: float
    shared: float

    @classmethod
    def of(cls, count: int, layout: Layout) -> Tokens:
        here = count / layout.context
        return cls(count, here, here / layout.tensor if layout.sequence else here)


def layer_input_bytes(arch: Architecture, tokens: Tokens, width: int) -> float:
    """All that is kept of a layer with recompute. `width`: bytes of an element of activations."""
    return tokens.shared * arch.hidden * width


def layer_bytes(arch: Architecture, layout: Layout, tokens: Tokens, width: int, kernels: Kernels, moe: bool) -> float:
    """All that one decoder layer keeps."""
    kept = 2 * _norm(tokens.shared, arch.hidden, width, kernels) + 2 * tokens.shared * arch.hidden * width
    kept += _attention(arch, layout, tokens, width, kernels)
    if not moe:
        return kept + _mlp(tokens.here, arch.ffn / layout.tensor, width, kernels)
    kept += _experts(arch, layout, tokens, width)
    if arch.shared_ffn:
        kept += _mlp(tokens.here, arch.shared_ffn / layout.tensor, width, kernels)
    return kept


def outer_bytes(
    arch: Architecture,
    layout: Layout,
    tokens: Tokens,
    width: int,
    kernels: Kernels,
    first: bool,
    last: bool,
    values: bool = False,
) -> float:
    """What embedding, final norm and head keep, and what all layers of a pass share. `values`: the head is a critic's."""
    kept = 0.0
    if first:
        kept += tokens.here * _INT
    if kernels.fused_rope:
        kept += tokens.here * arch.head_dim * arch.rotary_fraction * width
    if last:
        kept += _norm(tokens.shared, arch.hidden, width, kernels)
        if values:
            # Each rank computes all values, in float32.
            kept += tokens.here * (arch.hidden * _FLOAT + 2 * _INT)
        else:
            # The head keeps all rows that it takes, and a few numbers a row.
            kept += tokens.here * (arch.hidden * width + 3 * _INT + 4 * _FLOAT)
    return kept


def _norm(rows: float, size: float, width: int, kernels: Kernels) -> float:
    """Input, which is also the residual stream, and the inverse root mean square."""
    kept = width if kernels.fused_norm else 2 * _FLOAT
    return rows * (size * kept + _FLOAT)


def _attention(arch: Architecture, layout: Layout, tokens: Tokens, width: int, kernels: Kernels) -> float:
    queries = arch.heads * arch.head_dim / layout.tensor
    keys = arch.kv_heads * arch.head_dim / layout.tensor
    mixed = (queries + 2 * keys) * width
    kept = arch.heads / layout.tensor * _FLOAT  # log-sum-exp
    seen = tokens.whole if layout.context > 1 else tokens.here
    if kernels.grouped_attention:
        kept += mixed + 2 * queries * width
        keys_kept = seen * (2 if layout.context > 1 else 1) * keys * width
    else:
        kept += 2 * queries * width
        keys_kept = seen * 2 * queries * width
    if arch.qk_norm:
        kept += (arch.heads + arch.kv_heads) / layout.tensor * _FLOAT
        if kernels.fused_norm:
            kept += queries * width
        elif width == _FLOAT:
            kept += 2 * queries * _FLOAT + mixed * (not kernels.grouped_attention) + keys * _FLOAT
        else:
            kept += 2 * (queries + keys) * _FLOAT
    if not kernels.fused_rope:
        kept += 4 * arch.head_dim * arch.rotary_fraction * width
    return tokens.here * kept + keys_kept


def _mlp(rows: float, size: float, width: int, kernels: Kernels) -> float:
    return rows * size * width * (3 if kernels.fused_mlp else 5)


def _experts(arch: Architecture, layout: Layout, tokens: Tokens, width: int) -> float:
    """With routes spread evenly over the ranks."""
    routing = 5 * arch.top_k * _INT + 2 * arch.top_k * _FLOAT + arch.top_k + arch.experts * _FLOAT
    if arch.sigmoid:
        routing += (arch.experts + 2 * arch.top_k) * _FLOAT
    rows = tokens.shared * arch.top_k * layout.expert_tensor
    return tokens.shared * routing + rows * width * (arch.hidden + 3 * arch.expert_ffn / layout.expert_tensor)
