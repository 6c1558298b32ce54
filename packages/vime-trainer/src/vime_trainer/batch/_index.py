"""What the buffer says of a batch before its samples are fetched, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2

_TRAINED = (sample_pb2.ROLLOUT_STATUS_COMPLETED, sample_pb2.ROLLOUT_STATUS_TRUNCATED)


@dataclass(frozen=True)
class BatchIndex:
    """G groups, R rollouts and S samples in the buffer's order.

    Attributes:
        batch_id, ordinal: as the buffer names and counts it.
        group_ids, rollout_ids, sample_ids: G, R and S names.
        groups: int64 [R], position of each rollout's group.
        rewards: float64 [R], NaN where there is none.
        usable: bool [R], completed or truncated, reliable, and scored.
        failed, unreliable, truncated: bool [R].
        named_rewards: every reward by name, float64 [R], NaN where a rollout has none.
        sample_rollouts: int64 [S].
        lengths, trainable: int64 [S], tokens and trainable tokens.
        version_samples, version_numbers, version_tokens: int64 [V], one entry per sample and version: generated tokens.
        bytes: serialised bytes of all samples.
    """

    batch_id: str
    ordinal: int
    group_ids: tuple[str, ...]
    rollout_ids: tuple[str, ...]
    sample_ids: tuple[str, ...]
    groups: np.ndarray
    rewards: np.ndarray
    usable: np.ndarray
    failed: np.ndarray
    unreliable: np.ndarray
    truncated: np.ndarray
    named_rewards: dict[str, np.ndarray]
    sample_rollouts: np.ndarray
    lengths: np.ndarray
    trainable: np.ndarray
    version_samples: np.ndarray
    version_numbers: np.ndarray
    version_tokens: np.ndarray
    bytes: int

    @classmethod
    def from_groups(cls, groups: Sequence[buffer_pb2.GroupIndex], batch_id: str = "", ordinal: int = 0) -> BatchIndex:
        """Reads a leased batch's groups.

        Raises:
            ContractError: a sample id twice, an empty sample, or a reward that is not finite.
        """
        rollouts = [(g, rollout) for g, group in enumerate(groups) for rollout in group.rollouts]
        samples = [(r, sample) for r, (_, rollout) in enumerate(rollouts) for sample in rollout.samples]
        for _, rollout in rollouts:
            if rollout.HasField("reward") and not math.isfinite(rollout.reward):
                raise ContractError(
                    "rollout.reward", f"{rollout.reward} is not finite (rollout {rollout.rollout_id!r})"
                )
        for _, sample in samples:
            if sample.tokens == 0:
                raise ContractError("sample.tokens", f"a sample without tokens (sample {sample.sample_id!r})")
        sample_ids = tuple(sample.sample_id for _, sample in samples)
        if len(set(sample_ids)) != len(sample_ids):
            twice = next(one for one in sample_ids if sample_ids.count(one) > 1)
            raise ContractError("sample.sample_id", f"{twice!r} occurs twice in batch {batch_id!r}")
        versions = [
            (s, entry.version.number, entry.tokens)
            for s, (_, sample) in enumerate(samples)
            for entry in sample.versions
        ]
        status = np.array([rollout.status for _, rollout in rollouts], np.int64)
        unreliable = np.array([not rollout.reliable for _, rollout in rollouts], bool)
        rewards = np.array(
            [rollout.reward if rollout.HasField("reward") else math.nan for _, rollout in rollouts], np.float64
        )
        names = sorted({name for _, rollout in rollouts for name in rollout.rewards})
        return cls(
            batch_id=batch_id,
            ordinal=ordinal,
            group_ids=tuple(group.group_id for group in groups),
            rollout_ids=tuple(rollout.rollout_id for _, rollout in rollouts),
            sample_ids=sample_ids,
            groups=np.array([g for g, _ in rollouts], np.int64),
            rewards=rewards,
            usable=np.isin(status, _TRAINED) & ~unreliable & ~np.isnan(rewards),
            failed=status == sample_pb2.ROLLOUT_STATUS_FAILED,
            unreliable=unreliable,
            truncated=status == sample_pb2.ROLLOUT_STATUS_TRUNCATED,
            named_rewards={
                name: np.array([rollout.rewards.get(name, math.nan) for _, rollout in rollouts], np.float64)
                for name in names
            },
            sample_rollouts=np.array([r for r, _ in samples], np.int64),
            lengths=np.array([sample.tokens for _, sample in samples], np.int64),
            trainable=np.array([sample.trainable_tokens for _, sample in samples], np.int64),
            version_samples=np.array([s for s, _, _ in versions], np.int64),
            version_numbers=np.array([number for _, number, _ in versions], np.int64),
            version_tokens=np.array([tokens for _, _, tokens in versions], np.int64),
            bytes=sum(sample.bytes for _, sample in samples),
        )

    def staleness(self, trained: int) -> tuple[float, int] | None:
        """Token-weighted mean, and that of the oldest segment, in batches behind weights that contain `trained`.

        None when nothing was generated.
        """
        counted = self.version_tokens > 0
        if not counted.any():
            return None
        lag = trained - self.version_numbers[counted]
        tokens = self.version_tokens[counted]
        return float((lag * tokens).sum() / tokens.sum()), int(lag.max())
