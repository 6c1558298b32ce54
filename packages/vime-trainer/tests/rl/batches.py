"""Batches and streams of algorithms, made by hand."""

import numpy as np
import torch

from vime_trainer.algorithms import AlgorithmSettings, RolloutBatch, Streams, algorithm_of, get_algorithm, objective


def one_token_batch(rewards, groups=None, usable=None, group_size=None):
    """A batch of rollouts with one sample of one trainable token each."""
    count = len(rewards)
    groups = np.zeros(count, np.int64) if groups is None else np.asarray(groups)
    usable = np.ones(count, bool) if usable is None else np.asarray(usable)
    return RolloutBatch(
        rewards=np.asarray(rewards, np.float64),
        groups=groups,
        usable=usable,
        truncated=np.zeros(count, bool),
        sample_rollouts=np.arange(count),
        lengths=np.ones(count, np.int64),
        mask=usable.copy(),
        group_ids=tuple(f"g{i}" for i in range(groups.max() + 1)),
        group_size=count if group_size is None else group_size,
    )


def streams(lengths, mask=None, **values):
    total = sum(lengths)
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    mask = torch.ones(total, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Streams(mask, bounds, {name: torch.as_tensor(v, dtype=torch.float32) for name, v in values.items()})


def advantages(name, batch, **settings):
    algorithm = get_algorithm(name)
    return algorithm.advantage(batch, AlgorithmSettings(name=name, **settings))["advantages"]


def rollout_batch(lengths, mask=None, rewards=None, groups=None, sample_rollouts=None, values=None, **logprobs):
    """A batch of samples of these lengths, one a rollout unless `sample_rollouts` says otherwise."""
    owners = np.arange(len(lengths)) if sample_rollouts is None else np.asarray(sample_rollouts)
    count, total = int(owners.max()) + 1, int(np.sum(lengths))
    groups = np.zeros(count, np.int64) if groups is None else np.asarray(groups)
    return RolloutBatch(
        rewards=np.zeros(count) if rewards is None else np.asarray(rewards, np.float64),
        groups=groups,
        usable=np.ones(count, bool),
        truncated=np.zeros(count, bool),
        sample_rollouts=owners,
        lengths=np.asarray(lengths, np.int64),
        mask=np.ones(total, bool) if mask is None else np.asarray(mask, bool),
        group_ids=tuple(f"g{i}" for i in range(int(groups.max()) + 1)),
        group_size=count,
        logprobs={name: np.asarray(one, np.float32) for name, one in logprobs.items()},
        values=None if values is None else np.asarray(values, np.float32),
    )


def evaluate(logprobs, given, **settings):
    """The objective of algorithm `settings["name"]` on streams."""
    settings = AlgorithmSettings(**settings)
    return objective(algorithm_of(settings), settings, logprobs, torch.full_like(logprobs, 0.5), given)


def toy(**values):
    """Three tokens of one sequence, with every stream."""
    base = {
        "advantages": [1.0, -1.0, -0.5],
        "old_logprobs": [-1.0, -1.0, -1.0],
        "engine_logprobs": [-1.2, -0.9, -3.0],
        "reference_logprobs": [-1.1, -1.3, -0.8],
        "weights": [1 / 3] * 3,
    }
    return streams([3], **{**base, **values})
