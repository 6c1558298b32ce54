"""One rank's share of a batch: its own samples' tokens, and everybody's light columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vime_proto.sample.v1 import sample_pb2
from vime_trainer.batch import BatchIndex, Columns, read_columns

from ._plan import Plan
from ._team import Team

# What only the model reads stays with the samples; everything else an algorithm may look at.
_OWN = ("tokens", "temperature")


def read_share(
    index: BatchIndex,
    samples: Mapping[str, sample_pb2.Sample],
    vocab_size: int | None,
    plan: Plan,
    team: Team,
    **wanted: bool,
) -> Columns:
    """Columns of the whole batch, of which this rank reads its own samples and hears of the others.

    Of other data ranks' samples there are masks and log-probs, but neither tokens nor temperatures nor routes.

    Args:
        index: the batch.
        samples: this rank's samples.
        vocab_size: token ids are below it.
        plan: who has which.
        team: the ranks; all of them call this.
        wanted: columns that not every algorithm needs, see `read_columns`.

    Raises:
        RefusedSamplesError: on every rank, with the samples that any rank refused.
        UnsupportedSamplingError: see `read_columns`.
    """
    mine = plan.owned[team.data_rank]
    with team.settled():
        own = read_columns(_only(index, mine), samples, vocab_size, **wanted)
    if team.data_size == 1:
        return own
    total = int(index.lengths.sum())
    starts = np.cumsum(index.lengths) - index.lengths
    rows = [rows_of(starts, index.lengths, owned) for owned in plan.owned]
    columns: dict[str, object] = {"starts": starts, "lengths": index.lengths}
    routing: list[object] = [None] * len(index.lengths)
    for sample, trace in zip(mine, own.routing, strict=True):
        routing[sample] = trace
    columns["routing"] = tuple(routing)
    for field in dataclasses.fields(Columns):
        values = getattr(own, field.name)
        if field.name in columns or not isinstance(values, np.ndarray):
            continue
        whole = np.ones(total, values.dtype) if field.name == "temperature" else np.zeros(total, values.dtype)
        if field.name in _OWN:
            whole[rows[team.data_rank]] = values
        else:
            for place, part in zip(rows, team.gather(values), strict=True):
                whole[place] = part
        columns[field.name] = whole
    return dataclasses.replace(own, **columns)


def _only(index: BatchIndex, samples: Sequence[int]) -> BatchIndex:
    """The index as if it named no other samples. What is said of rollouts and versions stays as it is."""
    if len(samples) == len(index.sample_ids):
        return index
    chosen = np.asarray(samples, np.int64)
    return dataclasses.replace(
        index,
        sample_ids=tuple(index.sample_ids[sample] for sample in samples),
        lengths=index.lengths[chosen],
        trainable=index.trainable[chosen],
        sample_rollouts=index.sample_rollouts[chosen],
    )


def rows_of(starts: np.ndarray, lengths: np.ndarray, samples: Sequence[int]) -> np.ndarray:
    """int64: positions of the tokens of samples, one sample after the other."""
    parts = [np.arange(starts[s], starts[s] + lengths[s]) for s in samples]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
