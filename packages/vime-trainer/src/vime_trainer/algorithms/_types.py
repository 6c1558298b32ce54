"""What an algorithm is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

# Settings name algorithms, and whoever reads settings should not wait for torch: functions import it.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RolloutBatch:
    """A whole batch as `advantage` sees it: G groups, R rollouts, S samples, T tokens of all samples end to end.

    Attributes:
        rewards: float64 [R], the reward trained on; NaN where there is none.
        groups: int64 [R], position of each rollout's group, 0 to G - 1.
        usable: bool [R], False for failed, unreliable and unscored rollouts: no baseline, no gradient.
        truncated: bool [R], cut by a limit.
        sample_rollouts: int64 [S], position of each sample's rollout.
        lengths: int64 [S], tokens of each sample.
        mask: bool [T], trainable tokens of usable rollouts.
        group_ids: G names, for errors.
        group_size: rollouts that a group was meant to have.
        logprobs: float32 [T] each, by name: "engine"; "old", "reference" and "teacher" where there are such.
        values: float32 [T], the critic's value of the prefix before each trainable token; None without a critic.
        end_values: float32 [R], the critic's value of all that a truncated rollout has when the limit cuts it, 0 for other
            rollouts; None unless the settings say `bootstrap_truncated`.
    """

    rewards: np.ndarray
    groups: np.ndarray
    usable: np.ndarray
    truncated: np.ndarray
    sample_rollouts: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    group_ids: tuple[str, ...]
    group_size: int
    logprobs: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: np.ndarray | None = None
    end_values: np.ndarray | None = None

    @property
    def token_rollouts(self) -> np.ndarray:
        """int64 [T], position of each token's rollout."""
        return np.repeat(self.sample_rollouts, self.lengths)

    @property
    def response_tokens(self) -> np.ndarray:
        """int64 [R], trainable tokens of each rollout, over all its samples."""
        return np.bincount(self.token_rollouts[self.mask], minlength=len(self.rewards))

    @property
    def last_tokens(self) -> np.ndarray:
        """int64 [R], place of each rollout's last trainable token, over all its samples; -1 where there is none."""
        places = np.flatnonzero(self.mask)
        last = np.full(len(self.rewards), -1)
        # Of equal indices the last assignment stands.
        last[self.token_rollouts[places]] = places
        return last

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """float32 [T]: one value a rollout, on each of its trainable tokens; 0 elsewhere."""
        return np.where(self.mask, values[self.token_rollouts], 0.0).astype(np.float32)

    def policy_logprobs(self) -> np.ndarray:
        """float32 [T]: the old policy's log-probs where they were computed, else those of the engine that sampled."""
        return self.logprobs["old"] if "old" in self.logprobs else self.logprobs["engine"]


@dataclass(frozen=True)
class Streams:
    """The per-token streams of one micro-batch of T tokens, on the model's device. None of them carries a gradient.

    Attributes:
        mask: bool [T], tokens that count. Every other stream is 0 where it is False.
        cu_seqlens: int64 [S + 1], bounds of the sequences.
        values: float32 [T] each, by name: what `advantage` returned, and "engine_logprobs", "old_logprobs",
            "reference_logprobs", "values", "proximal_alpha" and "correction_scale" where there are such.
    """

    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    values: Mapping[str, torch.Tensor]

    def to(self, device: torch.device | str) -> Streams:
        """Copies every stream to `device`."""
        values = {name: value.to(device, non_blocking=True) for name, value in self.values.items()}
        return Streams(self.mask.to(device), self.cu_seqlens.to(device), values)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[name]

    def old_logprobs(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Log-probs of the old policy, detached.

        Those that were computed before the first update; else, with "proximal_alpha", those on the line between engine
        and `logprobs` (see `proximal_logprobs`); else `logprobs` itself.
        """
        old = self.values.get("old_logprobs")
        if old is not None:
            return old
        alpha = self.values.get("proximal_alpha")
        if alpha is not None:
            return proximal_logprobs(self.values["engine_logprobs"], logprobs.detach(), alpha)
        return logprobs.detach()

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[S]: sum of `values` [T] over each sequence's trainable tokens. Masked values do not matter, NaN included."""
        kept = values.where(self.mask, 0)
        sums = kept.new_zeros(self.cu_seqlens.numel() - 1)
        return sums.index_add(0, self._sequence_of_token(), kept)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[S]: mean over each sequence's trainable tokens; 0 for a sequence without any."""
        counts = self.sequence_sum(self.mask.to(values.dtype))
        return self.sequence_sum(values) / counts.clamp(min=1)

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """[T]: each sequence's value [S] on all of its tokens."""
        return values[self._sequence_of_token()]

    def _sequence_of_token(self) -> torch.Tensor:
        import torch

        lengths = self.cu_seqlens.diff()
        return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


@dataclass(frozen=True)
class Terms:
    """What `loss` returns.

    Attributes:
        loss: [T], a term per token, to be minimised; the trainer masks, weighs and sums them.
        metrics: [T] each, detached; logged as means over trainable tokens under "policy/<name>".
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def proximal_logprobs(engine: torch.Tensor, logprobs: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """[T]: log pi_prox = log mu + alpha (log pi - log mu), the log-linear stand-in for a pass of the old policy.

    arXiv:2512.06547; see `proximal_alpha` for alpha.
    """
    return engine + alpha * (logprobs - engine)


Advantage = Callable[[RolloutBatch, Any], Mapping[str, np.ndarray]]
Loss = Callable[["torch.Tensor", "torch.Tensor", Streams, Any], Terms]
ValueLoss = Callable[["torch.Tensor", Streams, Any], Terms]


@dataclass(frozen=True)
class Algorithm:
    """Two functions over per-token streams, three with a critic; the trainer does everything else.

    Attributes:
        name: as in the configuration.
        advantage: (batch, settings) -> float32 [T] streams by name, among them "advantages", and "returns" for a critic;
            outside autograd.
        loss: (live log-probs [T], entropy [T], streams, settings) -> Terms; inside autograd.
        aggregation: "token", "sequence" or "constant", unless the configuration says otherwise.
        needs_group: whether the baseline is the group, so that a group of one has none.
        defaults: settings that differ from the common defaults, by key.
        needs_critic: a value model is trained beside the policy, and `batch.values` holds its values.
        needs_teacher: samples must bring a teacher's log-probs; `batch.logprobs["teacher"]` holds them.
        token_rewards: `advantage` places rewards on tokens itself, and with them the KL penalty where it is part of the
            reward. Otherwise `batch.rewards` is less the penalty already.
        kl_in_reward: whether a KL penalty within the reward has a meaning for it.
        value_loss: (live values [T], streams, settings) -> Terms; inside autograd. With `needs_critic` alone.
    """

    name: str
    advantage: Advantage
    loss: Loss
    aggregation: str = "token"
    needs_group: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs_critic: bool = False
    needs_teacher: bool = False
    token_rewards: bool = False
    kl_in_reward: bool = True
    value_loss: ValueLoss | None = None

    def __post_init__(self) -> None:
        if self.needs_critic != (self.value_loss is not None):
            raise ValueError(f"algorithm {self.name}: needs_critic and value_loss go together")
