"""A packed batch made ready for the model: on its device, padded when asked, with the rows that need logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.megatron._attention import needs_dense
from vime_trainer.megatron._layout import SequenceLayout, layout_of
from vime_trainer.packed import PackedBatch, ReplayRows

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """Tensors on the model's device. M tokens go through the model, N of the batch's tokens need logits.

    Attributes:
        tokens, positions: int64 [M].
        layout: for the core attention.
        sources: int64 [N], the model's token whose output predicts each of them.
        targets: int64 [N], their ids.
        temperature: float32 [N].
        places: int64 [N], their places in the batch.
        routes: for the M tokens.
        lowest, highest: smallest and largest token id.
    """

    tokens: Tensor
    positions: Tensor
    layout: SequenceLayout
    sources: Tensor
    targets: Tensor
    temperature: Tensor
    places: Tensor
    routes: ReplayRows | None
    lowest: int
    highest: int


def prepare(
    batch: PackedBatch, wanted: Tensor | None, device: torch.device, dtype: torch.dtype, padded: bool
) -> Prepared:
    """Plans the forward pass on the host, then copies.

    Raises:
        ValueError: `wanted` is not bool [T].
    """
    host = batch.to("cpu")
    choose = host.positions > 0
    if wanted is not None:
        if wanted.dtype != torch.bool or wanted.shape != host.tokens.shape:
            raise ValueError(f"wanted: need bool [{batch.total}], got {wanted.dtype} {list(wanted.shape)}")
        choose = choose & wanted.cpu()
    places = torch.nonzero(choose).flatten()
    tokens, positions, routes, lengths = host.tokens, host.positions, host.routes, host.lengths
    sources = places - 1
    if padded:
        tokens, positions, routes, lengths, cells = _pad(host, lengths)
        sources = cells[sources]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Prepared(
        tokens=tokens.to(device),
        positions=positions.to(device),
        layout=layout_of(lengths, bounds.to(device), needs_dense(device, dtype)),
        sources=sources.to(device),
        targets=host.tokens[places].to(device),
        temperature=host.temperature[places].to(device),
        places=places.to(device),
        routes=routes,
        lowest=int(host.tokens.min()),
        highest=int(host.tokens.max()),
    )


def _pad(batch: PackedBatch, lengths: list[int]) -> tuple[Tensor, Tensor, ReplayRows | None, list[int], Tensor]:
    """Every sequence as long as the longest. Padding comes last, so under a causal mask no real token sees it."""
    longest, count = max(lengths), len(lengths)
    sequence = torch.arange(count).repeat_interleave(torch.tensor(lengths))
    cells = sequence * longest + batch.positions
    tokens = torch.zeros(count * longest, dtype=torch.int64).index_copy(0, cells, batch.tokens)
    positions = torch.arange(longest).repeat(count)
    routes = batch.routes
    if routes is not None:
        from vime_r3.layout import take

        token_of = torch.full((count * longest,), -1).index_copy(0, cells, torch.arange(batch.total))
        ids, valid = take(routes.ids, routes.valid, token_of.numpy())
        routes = ReplayRows(ids, valid, routes.layer_ids, routes.measure)
    return tokens, positions, routes, [longest] * count, cells
