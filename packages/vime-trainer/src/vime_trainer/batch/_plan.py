"""Cutting a batch: optimizer steps, shares of data-parallel ranks, micro-batches. Every rank derives the same plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_groups(groups: np.ndarray, parts: int) -> list[np.ndarray]:
    """bool [R] for each optimizer step: whole groups, in order, as evenly as they go.

    Args:
        groups: int64 [R], position of each rollout's group.
        parts: optimizer steps; fewer result when there are fewer groups.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    bounds = np.linspace(0, count, min(parts, max(count, 1)) + 1).round().astype(int)
    return [(groups >= low) & (groups < high) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]


def partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Positions of items for each of `parts` ranks: counts differ by at most one, tokens are balanced.

    Items are dealt from the longest to the shortest, back and forth over the ranks.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    shares: list[list[int]] = [[] for _ in range(parts)]
    for turn in range(0, len(order), parts):
        dealt = order[turn : turn + parts]
        ranks = range(parts) if (turn // parts) % 2 == 0 else range(parts - 1, -1, -1)
        for rank, item in zip(ranks, dealt, strict=False):
            shares[rank].append(item)
    return [sorted(share) for share in shares]


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
