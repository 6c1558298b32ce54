"""Causal core attention over packed sequences: SDPA on the CPU or in float32, torch's varlen kernel on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vime_trainer.megatron._layout import Segment, SequenceLayout
from vime_trainer.megatron._rotary import turn

__all__ = ["PackedAttention", "by_token", "needs_dense"]


def needs_dense(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the varlen kernel does not serve this device and element type."""
    return device.type != "cuda" or dtype == torch.float32


def by_token(query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Heads [tokens, heads, head_dim] of what Megatron gives as [tokens, 1, heads, head_dim]; where the layout leaves that to
    attention, queries and keys are turned by their positions."""
    query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
    if layout.turns is not None:
        query, key = turn(query, layout.turns), turn(key, layout.turns)
    return query, key, value


class PackedAttention(MegatronModule):
    """Takes the place of Megatron's DotProductAttention, which refuses packed sequences.

    Args are those of megatron.core.transformer.attention.CoreAttentionBuilder.

    Raises:
        ValueError: a layer that is not causal, or has a window.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.window_size is not None:
            raise ValueError(f"layer {layer_number - 1}: sliding-window attention is not supported")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.groups = config.num_attention_heads // config.num_query_groups

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SequenceLayout | None = None,
    ) -> Tensor:
        """Attention within each sequence.

        Args:
            query: [tokens, 1, heads, head_dim].
            key, value: [tokens, 1, KV heads, head_dim].
            packed_seq_params: where the sequences lie.

        Returns:
            [tokens, 1, heads * head_dim].
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs a SequenceLayout")
        layout = packed_seq_params
        query, key, value = by_token(query, key, value, layout)
        if layout.segments:
            key, value = _gather(key, value, layout)
        if layout.segments and layout.dense:
            out = self._segments(query, key, value, layout)
        elif layout.blocks:
            out = self._dense(query, key, value, layout)
        else:
            out = self._varlen(query, key, value, layout)
        return out.reshape(out.size(0), 1, -1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # The kernel scales by 1/sqrt(head_dim); another scale goes into the query.
        usual = 1.0 / math.sqrt(query.size(-1))
        if self.scale != usual:
            query = query * (self.scale / usual)
        bounds = (layout.cu_seqlens_q, layout.cu_seqlens_kv, layout.max_seqlen_q, layout.max_seqlen_kv)
        if layout.key_rows is not None:
            key, value = key[layout.key_rows], value[layout.key_rows]
        # With fewer queries than keys the kernel lets the last query see the last key, as is meant.
        return varlen_attn(query, key, value, *bounds, window_size=(-1, 0))

    def _segments(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        outputs = []
        for segment in layout.segments:
            cells = [part.transpose(0, 1)[None] for part in (query[segment.queries], *_take(segment, key, value))]
            rows, columns = cells[0].size(2), cells[1].size(2)
            seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
            out = scaled_dot_product_attention(*cells, attn_mask=seen, scale=self.scale, enable_gqa=self.groups > 1)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        if self.groups > 1:
            key = key.repeat_interleave(self.groups, dim=1)
            value = value.repeat_interleave(self.groups, dim=1)
        heads, dim = query.shape[1:]
        outputs = []
        for block in layout.blocks:
            shape = (block.count, block.longest, heads, dim)
            cells = [
                (part if block.rows is None else part[block.rows.flatten()]).view(shape).transpose(1, 2)
                for part in (query, key, value)
            ]
            out = scaled_dot_product_attention(*cells, is_causal=True, scale=self.scale)
            outputs.append(out.transpose(1, 2).reshape(-1, heads, dim))
        if layout.order is None:
            return outputs[0]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[layout.order]


def _take(segment: Segment, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key[segment.keys], value[segment.keys]


def _gather(key: Tensor, value: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of all context-parallel ranks, in the order of the batch; their gradients are added up."""
    both = torch.stack((key, value), dim=1)
    found = gather_from_sequence_parallel_region(both, group=parallel_state.get_context_parallel_group())
    return found.index_select(0, layout.gathered).unbind(1)  # type: ignore[return-value]
