"""What a critic says of a batch: the value before every trainable token, and after the last one of what a limit cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from vime_trainer.algorithms import RolloutBatch
from vime_trainer.batch import Columns

__all__ = ["Ends", "truncated_ends"]


@dataclass(frozen=True)
class Ends:
    """A batch in which some samples are one token longer.

    A model says at each token what the prefix before it is worth. So the worth of a whole sample is read at one token more;
    which token that is does not matter, as no other one sees it.

    Attributes:
        columns: the batch with those tokens.
        mask: bool [T + E], tokens whose values are wanted.
        kept: bool [T + E], False at the E tokens more.
        rollouts: int64 [E], whose they are, in their order.
    """

    columns: Columns
    mask: np.ndarray
    kept: np.ndarray
    rollouts: np.ndarray

    def split(self, values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of float32 [T + E], the [T] of the batch, and float32 [count] by rollout, 0 for those that have no such token."""
        ends = np.zeros(count, np.float32)
        ends[self.rollouts] = values[~self.kept]
        return values[self.kept], ends


def truncated_ends(columns: Columns, batch: RolloutBatch) -> Ends:
    """A token more where a limit cut a rollout: at the end of the sample that has its last trainable token."""
    rollouts = np.flatnonzero(batch.truncated & (batch.last_tokens >= 0))
    samples = np.searchsorted(columns.starts, batch.last_tokens[rollouts], side="right") - 1
    order = np.argsort(samples)
    rollouts, samples = rollouts[order], samples[order]
    lengths = columns.lengths.copy()
    lengths[samples] += 1
    starts = np.cumsum(lengths) - lengths
    kept = np.ones(int(lengths.sum()), bool)
    kept[starts[samples] + lengths[samples] - 1] = False

    def stretched(values: np.ndarray, fill: float) -> np.ndarray:
        longer = np.full(len(kept), fill, values.dtype)
        longer[kept] = values
        return longer

    longer = dataclasses.replace(
        columns,
        tokens=stretched(columns.tokens, 0),
        trainable=stretched(columns.trainable, 0),
        engine_logprobs=stretched(columns.engine_logprobs, 0),
        temperature=stretched(columns.temperature, 1),
        starts=starts,
        lengths=lengths,
        teacher_logprobs=None,
        versions=None,
    )
    return Ends(longer, stretched(batch.mask, True), kept, rollouts)
