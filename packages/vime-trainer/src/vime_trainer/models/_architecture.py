"""Sizes and switches of a decoder-only transformer, free of any file format or framework."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with rotary positions, RMSNorm, gated SiLU and grouped-query attention.

    Attributes:
        layers, hidden, vocab: number of decoder layers, width of the residual stream, rows of the embedding.
        heads, kv_heads, head_dim: query heads, key and value heads, width of one.
        ffn: width of a dense layer's feed-forward part.
        tied: output head and embedding are one tensor.
        norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        max_positions: longest sequence that the model was made for, in tokens.
        init_std: standard deviation of random weights.
        qk_norm: RMSNorm of each head's query and key.
        qkv_bias: bias in the query, key and value projections.
        experts, top_k, expert_ffn: routed experts of an MoE layer, experts a token, width of one; 0 without MoE.
        renormalise: weights of the chosen experts sum to 1.
        sigmoid: experts are scored by a sigmoid each instead of one softmax.
        expert_bias: the choice of experts, but not their weights, counts a bias of each expert.
        routed_scaling: factor on the routed experts' output.
        shared_ffn: width of the shared experts together, which see every token of an MoE layer; 0 without.
        rotary_fraction: part of each head that rotary positions turn, from the front.
        mtp_layers: layers for multi-token prediction that a folder holds behind the last one; they are not loaded.
        moe_layers: numbers of the MoE layers, counted from 0; all other layers are dense.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    init_std: float
    qk_norm: bool = True
    qkv_bias: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    renormalise: bool = True
    sigmoid: bool = False
    expert_bias: bool = False
    routed_scaling: float = 1.0
    shared_ffn: int = 0
    rotary_fraction: float = 1.0
    mtp_layers: int = 0
    moe_layers: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"num_attention_heads: {self.heads} is no multiple of num_key_value_heads {self.kv_heads}")
        if self.moe_layers and not 0 < self.top_k <= self.experts:
            raise ValueError(f"num_experts_per_tok: {self.top_k}; valid: 1 to {self.experts} (the number of experts)")

    def size(self, dim: str) -> int:
        """Length of a dimension of a weight: an attribute's name, "queries" or "keys" (all heads side by side)."""
        if dim == "queries":
            return self.heads * self.head_dim
        return self.kv_heads * self.head_dim if dim == "keys" else int(getattr(self, dim))
