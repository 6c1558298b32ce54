"""Per-token figures gathered over the micro-batches of a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from vime_trainer.batch import BatchIndex, Columns, MicroBatch
from vime_trainer.metrics import mean, mean_and_std, spread

DIFFERENCE = "train_rollout_logprob_abs_diff"


class TokenFigures:
    """Collects values of trainable tokens; means are over tokens, not over micro-batches."""

    def __init__(self) -> None:
        self._values: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Adds [T] tensors where the mask is True."""
        for name, tensor in values.items():
            self._values[name].append(tensor[mask].float().cpu().numpy())

    def figures(self) -> dict[str, float]:
        """Means under "policy/<name>", with minimum and maximum of the ratio."""
        result: dict[str, float] = {}
        for name, parts in self._values.items():
            values = np.concatenate(parts)
            result |= mean(f"policy/{name}", values)
            if name == "ratio" and values.size:
                result |= {"policy/ratio_min": float(values.min()), "policy/ratio_max": float(values.max())}
        return result


class LogprobDifference:
    """|trainer - engine| per trainable token, by the trainer's weights before the batch's first update."""

    def __init__(self, columns: Columns):
        self._engine = columns.engine_logprobs
        self._values: list[np.ndarray] = []
        self._signed: list[np.ndarray] = []
        self._sequence_max = 0.0

    def add(self, micro: MicroBatch, logprobs: torch.Tensor) -> None:
        """Adds the tokens of a micro-batch; `logprobs` float32 [T]."""
        signed, mask = self.difference(micro, logprobs)
        self._values.append(np.abs(signed[mask]))
        self._signed.append(signed[mask])
        sequence = np.repeat(np.arange(len(micro.samples)), np.diff(micro.batch.cu_seqlens.numpy()))
        counts = np.bincount(sequence[mask], minlength=len(micro.samples))
        sums = np.bincount(sequence[mask], weights=np.abs(signed[mask]), minlength=len(micro.samples))
        if counts.any():
            self._sequence_max = max(self._sequence_max, float((sums / np.maximum(counts, 1)).max()))

    def difference(self, micro: MicroBatch, logprobs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """float64 [T] trainer - engine, and bool [T], which of them count."""
        mask = micro.streams.mask.numpy()
        live = logprobs.detach().float().cpu().numpy().astype(np.float64)
        return live - self._engine[micro.rows], mask

    def mean_of(self, micro: MicroBatch, logprobs: torch.Tensor) -> float | None:
        """Mean over the tokens of one micro-batch; None when none counts."""
        signed, mask = self.difference(micro, logprobs)
        return float(np.abs(signed[mask]).mean()) if mask.any() else None

    def figures(self) -> dict[str, float]:
        """The spread, the worst sequence's mean, and the KL estimate rho - log rho - 1 with rho = trainer / engine."""
        values = np.concatenate(self._values) if self._values else np.zeros(0)
        figures = spread(DIFFERENCE, values)
        if values.size:
            signed = np.clip(np.concatenate(self._signed), -20.0, 20.0)
            figures[f"{DIFFERENCE}/sequence_max"] = self._sequence_max
            figures["train_rollout_kl"] = float(np.mean(np.exp(signed) - signed - 1.0))
        return figures


def batch_figures(index: BatchIndex, trained: int) -> dict[str, float]:
    """What the buffer's index says: rewards, lengths, failures, staleness."""
    usable = index.usable
    figures = mean_and_std("reward", index.rewards[usable])
    for name, values in index.named_rewards.items():
        figures |= mean(f"reward/{name}", values[usable & ~np.isnan(values)])
    tokens = np.bincount(index.sample_rollouts, weights=index.trainable, minlength=len(usable))[usable]
    if tokens.size:
        figures |= {"response_tokens/mean": float(tokens.mean()), "response_tokens/max": float(tokens.max())}
        figures["truncated_share"] = float(index.truncated[usable].mean())
        figures["rollouts/empty"] = float(np.count_nonzero(tokens == 0))
    figures |= _group_figures(index)
    figures |= {
        "groups": float(len(index.group_ids)),
        "rollouts": float(len(usable)),
        "rollouts/failed": float(np.count_nonzero(index.failed)),
        "rollouts/unreliable": float(np.count_nonzero(index.unreliable)),
        "batch_bytes": float(index.bytes),
    }
    staleness = index.staleness(trained)
    if staleness is not None:
        figures |= {"staleness/mean": staleness[0], "staleness/max": float(staleness[1])}
    return figures


def _group_figures(index: BatchIndex) -> dict[str, float]:
    count = np.bincount(index.groups[index.usable], minlength=len(index.group_ids))
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, index.groups[index.usable], index.rewards[index.usable])
    np.maximum.at(high, index.groups[index.usable], index.rewards[index.usable])
    figures = {"groups/without_baseline": float(np.count_nonzero(count < 2))}
    compared = count > 1
    if compared.any():
        figures["groups/zero_variance_share"] = float((low[compared] >= high[compared]).mean())
    return figures
