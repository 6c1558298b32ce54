"""Values of rows that context-parallel ranks computed, brought together on each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_rows"]


def gather_rows(values: Tensor, counts: tuple[int, ...], rank: int, group: Any) -> Tensor:
    """Rows of all ranks, one rank after the other, on every rank.

    What follows is computed alike on all ranks, so the gradient of a rank's rows is its part of the gradient here: to add up
    those of all ranks would count it several times.

    Args:
        values: [counts[rank], ...].
        counts: rows of each rank.
        rank, group: of the context-parallel group.

    Returns:
        [sum of counts, ...].
    """
    return _GatherRows.apply(values, counts, rank, group)  # type: ignore[return-value]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: tuple[int, ...], rank: int, group: Any) -> Tensor:
        ctx.span = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        longest = max(counts)
        if longest == 0:
            return values.clone()
        mine = values.new_zeros(longest, *values.shape[1:])
        mine[: values.size(0)] = values
        found = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(found, mine, group=group)
        return torch.cat([one[:count] for one, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad[ctx.span].contiguous(), None, None, None
