"""Transformer Engine's attention over packed sequences. Import it only where Transformer Engine is installed."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime_trainer.megatron._attention import by_token
from vime_trainer.megatron._layout import SequenceLayout

__all__ = ["TeAttention"]


class TeAttention(TEDotProductAttention):
    """Megatron's wrapper of it, fed with this package's layout: heads by token, boundaries of sequences beside them."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SequenceLayout | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention within each sequence.

        Args:
            query: [tokens, 1, heads, head_dim].
            key, value: [tokens, 1, KV heads, head_dim].
            packed_seq_params: where the sequences lie; all their tokens are here.

        Returns:
            [tokens, 1, heads * head_dim].
        """
        if packed_seq_params is None:
            raise ValueError("TeAttention needs a SequenceLayout")
        layout = packed_seq_params
        query, key, value = by_token(query, key, value, layout)
        bounds = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_kv=layout.cu_seqlens_kv,
            max_seqlen_q=layout.max_seqlen_q,
            max_seqlen_kv=layout.max_seqlen_kv,
        )
        out = super().forward(query, key, value, None, attn_mask_type, None, bounds, num_splits)
        return out.reshape(out.size(0), 1, -1)
