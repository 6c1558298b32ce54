"""A packed batch made ready for one rank: its tokens on the model's device, and the rows that need the output head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vime_trainer.megatron import Parallel
from vime_trainer.megatron._attention import needs_dense
from vime_trainer.megatron._layout import SequenceLayout, layout_of, zigzag, zigzag_layout
from vime_trainer.packed import PackedBatch, RecordRows, ReplayRows

__all__ = ["Cut", "Prepared", "agreed_lengths", "prepare", "routed_tokens", "stream_length"]

_FILLER = 0
"""Token id of padding; nothing depends on it."""


@dataclass(frozen=True)
class Cut:
    """Which tokens of a batch this rank computes.

    Attributes:
        context_rank, context_size: context parallelism: a pair of parts, see `zigzag`.
        token_rank, token_size: sequence parallelism: one of equal parts of those.
    """

    context_rank: int = 0
    context_size: int = 1
    token_rank: int = 0
    token_size: int = 1

    @classmethod
    def of(cls, here: Parallel) -> Cut:
        """That of a rank."""
        shared = here.config.shares_tokens
        return cls(
            here.context_rank,
            here.context_size,
            here.tensor_rank if shared else 0,
            here.tensor_size if shared else 1,
        )

    @property
    def multiple(self) -> int:
        """Batches are padded to a multiple of it."""
        return self.token_size * (2 * self.context_size if self.context_size > 1 else 1)


@dataclass(frozen=True)
class Prepared:
    """Tensors on the model's device. This context-parallel rank computes M tokens and the head's rows for N of them.

    Attributes:
        tokens, positions: int64 [M].
        layout: for the core attention.
        sources: int64 [N], the tokens whose outputs predict each of them.
        targets: int64 [N], their ids.
        temperature: float32 [N].
        counts: rows of each context-parallel rank; N is this rank's.
        places: int64 [sum of counts], their places in the batch, by context-parallel rank.
        total: tokens of the batch.
        length: tokens that go through the model, on all ranks together.
        routes: for the tokens that this rank's routers see.
        seen: int64 on the host: place in the batch of each such token, -1 for padding.
        unread: bool on the host, of each such token: padding, and last tokens, which predict nothing and which no other sees.
    """

    tokens: Tensor
    positions: Tensor
    layout: SequenceLayout
    sources: Tensor
    targets: Tensor
    temperature: Tensor
    counts: tuple[int, ...]
    places: Tensor
    total: int
    length: int
    routes: ReplayRows | RecordRows | None
    seen: np.ndarray
    unread: np.ndarray


def stream_length(lengths: Sequence[int], padded: bool, cut: Cut) -> int:
    """Tokens that go through the model for sequences of these lengths, on all ranks together, with padding."""
    length = max(lengths) * len(lengths) if padded else sum(lengths)
    return -(-length // cut.multiple) * cut.multiple


def routed_tokens(lengths: Sequence[int], padded: bool, cut: Cut, length: int) -> np.ndarray:
    """int64: places in a batch of sequences of these lengths of the tokens that a rank's routers see, -1 for padding.

    Args:
        lengths: of the sequences.
        padded: pad every sequence to the longest.
        cut: the rank's part.
        length: tokens with padding, see `stream_length`.
    """
    stream = _stream(lengths, padded, length)
    return _routed(stream.tokens[_computed(len(stream.tokens), cut)], cut)


def agreed_lengths(lengths: list[int], here: Parallel, free: bool = False) -> list[int]:
    """The longest of each micro-batch over the ranks that must agree. Collective over all ranks.

    Those are the ranks that exchange tokens for experts; and all, where such a group has a part of a model replica, which
    must agree with the rest of its replica.

    Args:
        lengths: of this rank's micro-batches.
        here: the ranks.
        free: lengths may differ; only the number of micro-batches is checked.

    Raises:
        ValueError: the ranks were given different numbers of batches.
    """
    found = here.gather(np.array(lengths, dtype=np.int64))
    counts = {len(one) for one in found}
    if len(counts) > 1:
        raise ValueError(f"batches: ranks were given different numbers of them, from {min(counts)} to {max(counts)}")
    if free:
        return lengths
    config = here.config
    replica, exchange = config.tensor * config.context, config.expert * config.expert_tensor
    if replica % exchange and exchange % replica:
        return np.max(found, axis=0).tolist()
    group = here.coordinates[here.rank].expert_data
    near = [one for one, place in zip(found, here.coordinates, strict=True) if place.expert_data == group]
    return np.max(near, axis=0).tolist()


def prepare(
    batch: PackedBatch,
    wanted: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    padded: bool,
    vocab: int,
    cut: Cut = Cut(),
    length: int | None = None,
) -> Prepared:
    """Plans the forward pass on the host, then copies.

    Args:
        batch: the same on all ranks of a model replica.
        wanted: bool [T], tokens that need the output head; default: all but first tokens.
        device, dtype: of the model.
        padded: pad every sequence to the longest.
        vocab: token ids are below it.
        cut: this rank's part.
        length: tokens with padding; default `stream_length`.

    Raises:
        ValueError: `wanted` is not bool [T], or token ids beyond the vocabulary.
    """
    host = batch.to("cpu")
    _check_ids(host.tokens, vocab)
    choose = host.positions > 0
    if wanted is not None:
        if wanted.dtype != torch.bool or wanted.shape != host.tokens.shape:
            raise ValueError(f"wanted: need bool [{batch.total}], got {wanted.dtype} {list(wanted.shape)}")
        choose = choose & wanted.cpu()
    whole = _stream(host.lengths, padded, length or stream_length(host.lengths, padded, cut))
    stream, cells, lengths = whole.tokens, whole.cells, whole.lengths
    mine = _computed(len(stream), cut)
    dense = needs_dense(device, dtype)
    if cut.context_size > 1:
        layout = zigzag_layout(lengths, device, dense, cut.context_rank, cut.context_size)
    else:
        layout = layout_of(lengths, device, dense)
    seen = _routed(stream[mine], cut)
    places = torch.nonzero(choose).flatten()
    owner, local = _owners(len(stream), cut, cells[places - 1])
    by_rank = [places[owner == rank] for rank in range(cut.context_size)]
    own = by_rank[cut.context_rank]
    inside = torch.cat([torch.arange(one) for one in lengths])
    tokens = host.tokens[stream.clamp(min=0)].masked_fill(stream < 0, _FILLER)
    return Prepared(
        tokens=tokens[mine].to(device),
        positions=inside[mine].to(device),
        layout=layout,
        sources=local[owner == cut.context_rank].to(device),
        targets=host.tokens[own].to(device),
        temperature=host.temperature[own].to(device),
        counts=tuple(len(one) for one in by_rank),
        places=torch.cat(by_rank).to(device),
        total=host.total,
        length=len(stream),
        routes=_routes(host.routes, seen),
        seen=seen,
        unread=_unread(host, seen),
    )


def _unread(batch: PackedBatch, seen: np.ndarray) -> np.ndarray:
    last = np.zeros(batch.total + 1, dtype=np.bool_)
    last[batch.cu_seqlens[1:].numpy() - 1] = True
    last[-1] = True  # that is where padding looks
    return last[seen]


def _check_ids(tokens: Tensor, vocab: int) -> None:
    lowest, highest = int(tokens.min()), int(tokens.max())
    if highest >= vocab or lowest < 0:
        raise ValueError(f"tokens: ids from {lowest} to {highest}; valid: 0 to {vocab - 1}")


@dataclass(frozen=True)
class _Stream:
    """What goes through the model, on all ranks together.

    Attributes:
        tokens: int64 [cells], place in the batch of each cell's token, -1 for padding.
        cells: int64 [T], cell of each token.
        lengths: of its sequences.
    """

    tokens: Tensor
    cells: Tensor
    lengths: list[int]


def _stream(lengths: Sequence[int], padded: bool, length: int) -> _Stream:
    total, found = sum(lengths), list(lengths)
    cells = torch.arange(total)
    if padded:
        # Right padding comes last in its sequence, so under a causal mask no real token sees it.
        longest, count = max(lengths), torch.tensor(lengths)
        starts = count.cumsum(0) - count
        cells += (torch.arange(len(lengths)) * longest - starts).repeat_interleave(count)
        found = [longest] * len(lengths)
    # Padding is a sequence of its own at the end, which no other sequence sees.
    spare = length - sum(found)
    if spare:
        found.append(spare)
    return _Stream(torch.full((length,), -1).index_copy(0, cells, torch.arange(total)), cells, found)


def _computed(total: int, cut: Cut) -> Tensor:
    """int64: cells of a stream of `total` that a rank computes, in its order."""
    return zigzag(total, cut.context_rank, cut.context_size) if cut.context_size > 1 else torch.arange(total)


def _routed(computed: Tensor, cut: Cut) -> np.ndarray:
    """Those of a context-parallel rank's tokens that one rank's routers see."""
    part = len(computed) // cut.token_size
    return computed[cut.token_rank * part : (cut.token_rank + 1) * part].numpy()


def _owners(total: int, cut: Cut, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Context-parallel rank of each cell of the stream, and its place among that rank's tokens."""
    if cut.context_size == 1:
        return torch.zeros_like(cells), cells
    owner, local = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    for rank in range(cut.context_size):
        mine = zigzag(total, rank, cut.context_size)
        owner[mine] = rank
        local[mine] = torch.arange(len(mine))
    return owner[cells], local[cells]


def _routes(routes: ReplayRows | RecordRows | None, seen: np.ndarray) -> ReplayRows | RecordRows | None:
    if not isinstance(routes, ReplayRows):
        return routes
    if routes.fetched is not None and routes.layer_ids:
        unknown = seen[seen >= 0][~np.asarray(routes.fetched)[seen[seen >= 0]]]
        if len(unknown):
            raise ValueError(
                f"routes: token {unknown[0]} of a batch is routed on this rank, which has not fetched its row"
            )
    if len(seen) == len(routes.valid) and np.array_equal(seen, np.arange(len(seen))):
        return routes
    from vime_r3.layout import take

    ids, valid = take(routes.ids, routes.valid, seen)
    # Padding has no row that could be inexact.
    exact = None if routes.exact is None else np.asarray(routes.exact)[seen] | (seen < 0)
    return ReplayRows(ids, valid, routes.layer_ids, routes.measure, exact)
