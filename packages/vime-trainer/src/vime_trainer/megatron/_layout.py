"""What the core attention must know of a packed batch, worked out once a forward pass instead of once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime_trainer.megatron._rotary import Turns

__all__ = ["Block", "Segment", "SequenceLayout", "layout_of", "zigzag", "zigzag_layout"]

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


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence on this rank, and the keys that the last of them sees.

    Attributes:
        queries: tokens, among this rank's.
        keys: tokens, among those of all ranks in order; the last key belongs to the last query.
    """

    queries: slice
    keys: slice


@dataclass
class SequenceLayout(PackedSeqParams):
    """Travels through Megatron's layers as `packed_seq_params`.

    `qkv_format` stays "sbhd": Megatron then keeps [tokens, 1, heads, dim] and applies the rotary embedding, already
    gathered by position, in one go instead of sequence by sequence.

    Attributes:
        longest: more than every position of a token.
        blocks: dense attention calls; empty where the varlen kernel takes the boundaries themselves.
        order: int64 [tokens], cell of each token in the concatenated outputs of the blocks; None when in order.
        segments: under context parallelism, this rank's queries in order; empty without.
        dense: whether segments go through dense attention.
        gathered: int64 [all tokens], where each one's key lies in what the context-parallel ranks gather.
        key_rows: int64 [keys], for the varlen kernel: keys of the segments, one segment after the other.
        turns: rotary positions of this rank's tokens, set by the model; None where Megatron applies them itself.
    """

    longest: int = 0
    blocks: tuple[Block, ...] = ()
    order: Tensor | None = None
    segments: tuple[Segment, ...] = ()
    dense: bool = False
    gathered: Tensor | None = None
    key_rows: Tensor | None = None
    turns: Turns | None = None


def layout_of(lengths: Sequence[int], device: torch.device, dense: bool) -> SequenceLayout:
    """Plans the attention of sequences laid end to end.

    Args:
        lengths: tokens of each sequence.
        device: of the model.
        dense: plan blocks for dense SDPA; otherwise the varlen kernel is used and needs none.
    """
    longest = max(lengths)
    bounds = _bounds(lengths, device)
    blocks: tuple[Block, ...] = ()
    order = None
    if dense:
        blocks, order = _blocks(lengths, device)
    return SequenceLayout(
        qkv_format="sbhd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        longest=longest,
        blocks=blocks,
        order=order,
    )


def zigzag(total: int, rank: int, size: int) -> Tensor:
    """int64 [total / size]: tokens of one context-parallel rank, one part from the front and its mirror from the back.

    Later tokens see more keys, so the pair costs about the same on every rank.

    Args:
        total: all tokens, a multiple of 2 * size.
    """
    part = total // (2 * size)
    back = 2 * size - 1 - rank
    return torch.cat([torch.arange(rank * part, (rank + 1) * part), torch.arange(back * part, (back + 1) * part)])


def zigzag_layout(lengths: Sequence[int], device: torch.device, dense: bool, rank: int, size: int) -> SequenceLayout:
    """Plans the attention of one context-parallel rank's tokens to the keys of all ranks.

    Args:
        lengths: tokens of each sequence; their sum is a multiple of 2 * size.
        device, dense: as in `layout_of`.
        rank, size: of the context-parallel group.
    """
    total = sum(lengths)
    part = total // (2 * size)
    segments = []
    for place, number in enumerate((rank, 2 * size - 1 - rank)):
        first, last = number * part, (number + 1) * part
        start = 0
        for length in lengths:
            low, high = max(start, first), min(start + length, last)
            if low < high:
                shift = place * part - first
                segments.append(Segment(slice(low + shift, high + shift), slice(start, high)))
            start += length
    where = torch.cat([zigzag(total, other, size) for other in range(size)])
    queries = [segment.queries.stop - segment.queries.start for segment in segments]
    keys = [segment.keys.stop - segment.keys.start for segment in segments]
    rows = None
    if not dense:
        rows = torch.cat([torch.arange(one.keys.start, one.keys.stop) for one in segments]).to(device)
    return SequenceLayout(
        qkv_format="sbhd",
        cu_seqlens_q=_bounds(queries, device),
        cu_seqlens_kv=_bounds(keys, device),
        max_seqlen_q=max(queries),
        max_seqlen_kv=max(keys),
        longest=max(lengths),
        segments=tuple(segments),
        dense=dense,
        gathered=where.argsort().to(device),
        key_rows=rows,
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _blocks(lengths: Sequence[int], device: torch.device) -> tuple[tuple[Block, ...], Tensor | None]:
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
