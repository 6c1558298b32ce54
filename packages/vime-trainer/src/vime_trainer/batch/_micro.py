"""A micro-batch: the model's input and the streams beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vime_trainer.algorithms import Streams
from vime_trainer.packed import PackedBatch

from ._columns import Columns


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a batch, laid end to end.

    Attributes:
        batch: input of the model, without routes.
        streams: what the loss reads, on the host.
        samples: positions of the samples, in the order they lie.
        rows: int64 [T], position of each token in the batch's columns.
    """

    batch: PackedBatch
    streams: Streams
    samples: tuple[int, ...]
    rows: np.ndarray


def build_micro_batch(
    columns: Columns, samples: Sequence[int], mask: np.ndarray, values: Mapping[str, np.ndarray]
) -> MicroBatch:
    """Gathers the tokens of `samples`.

    Args:
        columns: the whole batch.
        samples: positions of the samples.
        mask: bool [T of the batch], tokens that count.
        values: float32 [T of the batch] each, by name; 0 is put where the mask is False.
    """
    chosen = np.asarray(samples)
    lengths = columns.lengths[chosen]
    offset = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(columns.starts[chosen], lengths) + offset
    kept = mask[rows]
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    bounds[1:] = torch.from_numpy(np.cumsum(lengths))
    batch = PackedBatch(
        tokens=torch.from_numpy(columns.tokens[rows]),
        positions=torch.from_numpy(offset),
        cu_seqlens=bounds.to(torch.int32),
        temperature=torch.from_numpy(columns.temperature[rows]),
    )
    streams = Streams(
        mask=torch.from_numpy(kept),
        cu_seqlens=bounds,
        values={
            name: torch.from_numpy(np.where(kept, column[rows], np.float32(0)).astype(np.float32))
            for name, column in values.items()
        },
    )
    return MicroBatch(batch, streams, tuple(samples), rows)
