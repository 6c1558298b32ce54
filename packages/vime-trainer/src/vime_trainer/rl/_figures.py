"""Per-token figures gathered over the micro-batches of a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from vime_trainer.batch import BatchIndex, Columns, MicroBatch
from vime_trainer.metrics import mean, mean_and_std, spread

from ._team import Team

DIFFERENCE = "train_rollout_logprob_abs_diff"


class TokenFigures:
    """Collects values of trainable tokens; means are over tokens, not over micro-batches.

    Args:
        prefix: of the metrics' names.
    """

    def __init__(self, prefix: str = "policy") -> None:
        self._prefix = prefix
        self._values: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Adds [T] tensors where the mask is True."""
        for name, tensor in values.items():
            self._values[name].append(tensor[mask].float().cpu().numpy())

    def figures(self, team: Team) -> dict[str, float]:
        """Means over all data ranks under "<prefix>/<name>", with minimum and maximum of the ratio."""
        names = sorted(self._values)
        own = np.array([_extent(np.concatenate(self._values[name])) for name in names]).reshape(len(names), 4)
        ranks = np.stack([part.reshape(-1, 4) for part in team.gather(own.ravel())])
        totals, counts = ranks[..., 0].sum(0), ranks[..., 1].sum(0)
        prefix = self._prefix
        result = {f"{prefix}/{name}": total / n for name, total, n in zip(names, totals, counts, strict=True) if n}
        if f"{prefix}/ratio" in result:
            at = names.index("ratio")
            result |= {f"{prefix}/ratio_min": ranks[:, at, 2].min(), f"{prefix}/ratio_max": ranks[:, at, 3].max()}
        return {name: float(value) for name, value in result.items()}


def _extent(values: np.ndarray) -> list[float]:
    """Sum, number, minimum and maximum."""
    if not values.size:
        return [0.0, 0.0, np.inf, -np.inf]
    return [float(values.sum(dtype=np.float64)), float(values.size), float(values.min()), float(values.max())]


class LogprobDifference:
    """|trainer - engine| per trainable token, by the trainer's weights before the batch's first update."""

    def __init__(self, columns: Columns):
        self._engine = columns.engine_logprobs
        self._signed: list[np.ndarray] = []
        self._sequence_max = -np.inf

    def add(self, micro: MicroBatch, logprobs: torch.Tensor) -> None:
        """Adds the tokens of a micro-batch; `logprobs` float32 [T]."""
        signed, mask = self.difference(micro, logprobs)
        if not mask.any():
            return
        self._signed.append(signed[mask])
        sequence = np.repeat(np.arange(len(micro.samples)), np.diff(micro.batch.cu_seqlens.numpy()))
        counts = np.bincount(sequence[mask], minlength=len(micro.samples))
        sums = np.bincount(sequence[mask], weights=np.abs(signed[mask]), minlength=len(micro.samples))
        self._sequence_max = max(self._sequence_max, float((sums / np.maximum(counts, 1)).max()))

    def difference(self, micro: MicroBatch, logprobs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """float64 [T] trainer - engine, and bool [T], which of them count."""
        mask = micro.streams.mask.numpy()
        live = logprobs.detach().float().cpu().numpy().astype(np.float64)
        return live - self._engine[micro.rows], mask

    def mean_of(self, micro: MicroBatch, logprobs: torch.Tensor, team: Team) -> float | None:
        """Mean over the tokens of one micro-batch of each data rank; None when none counts."""
        signed, mask = self.difference(micro, logprobs)
        values = np.concatenate(team.gather(np.abs(signed[mask])))
        return float(values.mean()) if values.size else None

    def figures(self, team: Team) -> dict[str, float]:
        """Over all data ranks: the spread, the worst sequence's mean, and the KL estimate rho - log rho - 1 with
        rho = trainer / engine."""
        own = np.concatenate([np.array([self._sequence_max]), *self._signed])
        ranks = team.gather(own)
        signed = np.concatenate([part[1:] for part in ranks])
        figures = spread(DIFFERENCE, np.abs(signed))
        if signed.size:
            signed = np.clip(signed, -20.0, 20.0)
            figures[f"{DIFFERENCE}/sequence_max"] = float(max(part[0] for part in ranks))
            figures["train_rollout_kl"] = float(np.mean(np.exp(signed) - signed - 1.0))
        return figures


def explained_variance(returns: np.ndarray, values: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """1 - var(return - value) / var(return) over the tokens under `mask`; absent where all returns are equal."""
    wanted, found = returns[mask].astype(np.float64), values[mask].astype(np.float64)
    spread_of_returns = wanted.var() if wanted.size else 0.0
    if not spread_of_returns > 0:
        return {}
    return {"critic/explained_variance": float(1.0 - (wanted - found).var() / spread_of_returns)}


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
