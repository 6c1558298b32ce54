"""Which data rank has which samples of a batch, and in which micro-batches. Every rank derives the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vime_trainer.batch import BatchIndex, BatchSettings, TokenCost, plan_shares, share_samples, split_groups

MicroPlan = Sequence[Sequence[Sequence[int]]]
"""For each data rank, micro-batches as lists of samples."""


@dataclass(frozen=True)
class Plan:
    """A batch, cut.

    Attributes:
        parts: bool [R] for each optimizer step, the rollouts that take part.
        owned: for each data rank, positions of the samples that it fetches, ascending; together all samples.
        steps: for each optimizer step and data rank, micro-batches as lists of samples. Every rank has equally many in
            a step; a list may be empty.
        whole: for each data rank, micro-batches of all its trained samples, likewise.
        multiple: the number of micro-batches of a step is a multiple of it.
    """

    parts: list[np.ndarray]
    owned: list[list[int]]
    steps: list[list[list[list[int]]]]
    whole: list[list[list[int]]]
    multiple: int = 1


def plan_batch(
    index: BatchIndex,
    settings: BatchSettings,
    data_size: int = 1,
    multiple: int = 1,
    cost: TokenCost | None = None,
) -> Plan:
    """Cuts a batch by what its index says.

    Args:
        index: the batch.
        settings: the table [batch].
        data_size: data ranks.
        multiple: the number of micro-batches of a step is a multiple of it.
        cost: of a sequence by its length; tokens when None.
    """
    parts = split_groups(index.groups, settings.optimizer_steps)
    trained = index.usable[index.sample_rollouts] & (index.trainable > 0)
    lengths = index.lengths.tolist()
    owned: list[list[int]] = [[] for _ in range(data_size)]

    def share_out(chosen: np.ndarray) -> list[list[int]]:
        shares = share_samples(lengths, np.flatnonzero(chosen).tolist(), data_size, cost)
        for rank, share in enumerate(shares):
            owned[rank] += share
        return shares

    def cut(shares: list[list[int]]) -> list[list[list[int]]]:
        return plan_shares(lengths, shares, settings.token_budget, settings.layout, multiple, cost)

    steps = [cut(share_out(trained & part[index.sample_rollouts])) for part in parts]
    whole = cut([sorted(share) for share in owned])
    # Nothing is learnt from the others, but they are checked like all.
    share_out(~trained)
    return Plan(parts, [sorted(share) for share in owned], steps, whole, multiple)


def critic_steps(
    index: BatchIndex, plan: Plan, settings: BatchSettings, parts: int, cost: TokenCost | None = None
) -> list[tuple[np.ndarray, MicroPlan]]:
    """The critic's optimizer steps on a batch: rollouts that take part, bool [R], and the micro-batches of each data rank.

    Every rank keeps the samples that it has, so of a part one rank may have more than another.

    Args:
        index, settings, cost: as of `plan_batch`.
        plan: what it returned.
        parts: optimizer steps.
    """
    if parts == len(plan.parts):
        return list(zip(plan.parts, plan.steps, strict=True))
    trained = {sample for share in plan.whole for micro in share for sample in micro}
    lengths = index.lengths.tolist()

    def cut(part: np.ndarray) -> MicroPlan:
        chosen = trained & set(np.flatnonzero(part[index.sample_rollouts]).tolist())
        shares = [[sample for sample in owned if sample in chosen] for owned in plan.owned]
        return plan_shares(lengths, shares, settings.token_budget, settings.layout, plan.multiple, cost)

    return [(part, cut(part)) for part in split_groups(index.groups, parts)]
