"""What the core attention must know of a packed batch, worked out once a forward pass instead of once a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

__all__ = ["Block", "SequenceLayout", "layout_of"]

# Right padding is free of error under a causal mask; above this waste, sequences are batched by equal length instead.
_PADDING_LIMIT = 1.5


@dataclass(frozen=True)
class Block:
    """Sequences that go through one attention call.

    Attributes:
        rows: int64 [sequences, longest], token of each cell; None when the batch is this block, in order.
        count: number of sequences.
        longest: tokens of the longest one.
        padded: whether some cells are padding (they repeat a token and are dropped from the output).
    """

    rows: Tensor | None
    count: int
    longest: int
    padded: bool


@dataclass
class SequenceLayout(PackedSeqParams):
    """Travels through Megatron's layers as `packed_seq_params`.

    `qkv_format` stays "sbhd": Megatron then keeps [tokens, 1, heads, dim] and applies the rotary embedding, already
    gathered by position, in one go instead of sequence by sequence.

    Attributes:
        blocks: attention calls; empty on a GPU, where the varlen kernel takes the boundaries themselves.
        order: int64 [tokens], cell of each token in the concatenated outputs of the blocks; None when in order.
    """

    blocks: tuple[Block, ...] = ()
    order: Tensor | None = None


def layout_of(lengths: list[int], bounds: Tensor, dense: bool) -> SequenceLayout:
    """Plans the attention of sequences laid end to end.

    Args:
        lengths: tokens of each sequence.
        bounds: int32 [sequences + 1] on the model's device.
        dense: plan blocks for dense SDPA; otherwise the varlen kernel is used and needs none.
    """
    longest = max(lengths)
    blocks: tuple[Block, ...] = ()
    order = None
    if dense:
        blocks, order = _blocks(lengths, bounds.device)
    return SequenceLayout(
        qkv_format="sbhd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=blocks,
        order=order,
    )


def _blocks(lengths: list[int], device: torch.device) -> tuple[tuple[Block, ...], Tensor | None]:
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    longest, total = int(sizes.max()), int(sizes.sum())
    if longest * len(lengths) == total:
        return (Block(None, len(lengths), longest, False),), None
    if longest * len(lengths) <= _PADDING_LIMIT * total:
        groups = [torch.arange(len(lengths))]
    else:
        groups = [torch.nonzero(sizes == size).flatten() for size in torch.unique(sizes)]
    blocks = []
    order = torch.empty(total, dtype=torch.int64)
    cells = 0
    for members in groups:
        width = int(sizes[members].max())
        inside = torch.arange(width).expand(len(members), width)
        real = inside < sizes[members, None]
        rows = starts[members, None] + torch.minimum(inside, sizes[members, None] - 1)
        cell = cells + torch.arange(rows.numel()).view_as(rows)
        order[rows[real]] = cell[real]
        cells += rows.numel()
        blocks.append(Block(rows.to(device), len(members), width, not bool(real.all())))
    return tuple(blocks), order.to(device)
