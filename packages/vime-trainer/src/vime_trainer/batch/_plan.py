"""Cutting a batch: optimizer steps, shares of data-parallel ranks, micro-batches. Every rank derives the same plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ._cost import TokenCost


def split_groups(groups: np.ndarray, parts: int) -> list[np.ndarray]:
    """bool [R] for each optimizer step: whole groups, in order, as evenly as they go.

    Args:
        groups: int64 [R], position of each rollout's group.
        parts: optimizer steps; fewer result when there are fewer groups.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    bounds = np.linspace(0, count, min(parts, max(count, 1)) + 1).round().astype(int)
    return [(groups >= low) & (groups < high) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]


def share_samples(
    lengths: Sequence[int], samples: Sequence[int], data_size: int, cost: TokenCost | None = None
) -> list[list[int]]:
    """Positions of the samples of each data rank, ascending, so that ranks take equally long.

    The dearest sample first, each goes to the rank with the least so far: the totals of two ranks differ by no more than
    the dearest sample. Ranks beyond the number of samples get none.

    Args:
        lengths: tokens of every sample of the batch.
        samples: positions of those to share out.
        data_size: data ranks.
        cost: of a sequence by its length; tokens when None.
    """
    chosen = [int(sample) for sample in samples]
    price = dict(zip(chosen, (cost or TokenCost()).of([lengths[s] for s in chosen]).tolist(), strict=True))
    shares: list[list[int]] = [[] for _ in range(data_size)]
    # Of ranks with equal totals, such as those that have only free samples, the one with fewer samples comes first.
    heap = [(0.0, 0, rank) for rank in range(data_size)]
    for sample in sorted(chosen, key=lambda one: (-price[one], one)):
        total, count, rank = heapq.heappop(heap)
        shares[rank].append(sample)
        heapq.heappush(heap, (total + price[sample], count + 1, rank))
    return [sorted(share) for share in shares]


def plan_shares(
    lengths: Sequence[int],
    shares: Sequence[Sequence[int]],
    token_budget: int,
    layout: str = "packed",
    multiple: int = 1,
    cost: TokenCost | None = None,
) -> list[list[list[int]]]:
    """Micro-batches of each data rank, equally many on all: lists of sample positions.

    Each rank's samples are placed by `plan_micro_batches`. A rank with fewer micro-batches than another splits its dearest
    ones; where nothing is left to split it has empty lists, which stand for a micro-batch in which nothing counts. The
    dearest micro-batches come first on every rank, so that those which run at the same time are alike.

    Args:
        lengths: tokens of every sample of the batch.
        shares: positions of each data rank's samples.
        token_budget, layout: see `plan_micro_batches`.
        multiple: the number of micro-batches is a multiple of it, as interleaved pipeline schedules want.
        cost: of a sequence by its length; tokens when None.
    """
    cost = cost or TokenCost()

    def price(micro: Sequence[int]) -> float:
        return float(cost.of([lengths[sample] for sample in micro]).sum())

    plans = [plan_micro_batches(lengths, share, token_budget, layout) for share in shares]
    count = max((len(plan) for plan in plans), default=0)
    count += -count % multiple
    for plan in plans:
        while len(plan) < count:
            dearest = max((micro for micro in plan if len(micro) > 1), key=price, default=None)
            if dearest is None:
                plan += [[] for _ in range(count - len(plan))]
            else:
                plan.remove(dearest)
                plan += share_samples(lengths, dearest, 2, cost)
        plan.sort(key=lambda micro: (-price(micro), micro))
    return plans


def plan_step(
    lengths: Sequence[int],
    samples: Sequence[int],
    data_size: int,
    token_budget: int,
    layout: str = "packed",
    multiple: int = 1,
    cost: TokenCost | None = None,
) -> list[list[list[int]]]:
    """Micro-batches of an optimizer step for each data rank: `share_samples`, then `plan_shares`.

    It follows from the arguments alone, so every rank derives the same plan.
    """
    shares = share_samples(lengths, samples, data_size, cost)
    return plan_shares(lengths, shares, token_budget, layout, multiple, cost)


def plan_micro_batches(
    lengths: Sequence[int], samples: Sequence[int], token_budget: int, layout: str = "packed"
) -> list[list[int]]:
    """First fit of the longest first: lists of samples with at most `token_budget` tokens each.

    A sample longer than the budget goes alone. In the padded layout every sample of a micro-batch counts as long as its
    longest, so samples of like length go together.

    Args:
        lengths: tokens of every sample of the batch.
        samples: positions of those to place.
        token_budget: most tokens of a micro-batch.
        layout: "packed" or "padded".
    """
    order = sorted(samples, key=lambda sample: (-lengths[sample], sample))
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in order:
        for place, left in enumerate(room):
            # The first sample of a bin is its longest.
            need = int(lengths[bins[place][0]] if layout == "padded" else lengths[sample])
            if need <= left:
                bins[place].append(sample)
                room[place] = left - need
                break
        else:
            bins.append([sample])
            room.append(token_budget - int(lengths[sample]))
    return [sorted(one) for one in bins]
