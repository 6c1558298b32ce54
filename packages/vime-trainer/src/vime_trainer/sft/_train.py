"""One optimizer step of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vime_trainer.optim import Optimizer, StepResult
from vime_trainer.packed import PackedBatch, pack
from vime_trainer.policy import Policy
from vime_trainer.sft._examples import Example

__all__ = ["SftStep", "micro_batches", "train_step"]


@dataclass(frozen=True)
class SftStep:
    """What a step saw and did.

    Attributes:
        loss: mean negative log-probability of the learnt tokens, nats.
        tokens, learnt: all tokens, and those in the loss.
        result: of the optimizer.
    """

    loss: float
    tokens: int
    learnt: int
    result: StepResult


def train_step(policy: Policy, optimizer: Optimizer, examples: Sequence[Example], micro_tokens: int) -> SftStep:
    """Raises the mean log-probability of the learnt tokens of a batch; how it is cut does not change the gradient."""
    count = sum(int(example.learnt[1:].sum()) for example in examples)
    tokens = sum(len(example.tokens) for example in examples)
    optimizer.zero_grad()
    loss = torch.zeros((), device=policy.device)
    for batch, learnt in micro_batches(examples, micro_tokens):
        part = -policy(batch, learnt).logprobs.sum() / count
        part.backward()
        loss += part.detach()
    return SftStep(float(loss), tokens, count, optimizer.step())


def micro_batches(examples: Sequence[Example], limit: int) -> Iterator[tuple[PackedBatch, Tensor]]:
    """Packed batches of at most `limit` tokens (at least one row each), rows of like length together, and masks."""
    ordered = sorted(examples, key=lambda example: len(example.tokens))
    chosen: list[Example] = []
    used = 0
    for example in [*ordered, None]:
        if chosen and (example is None or used + len(example.tokens) > limit):
            mask = torch.from_numpy(np.concatenate([one.learnt for one in chosen]))
            yield pack([torch.from_numpy(one.tokens) for one in chosen]), mask
            chosen, used = [], 0
        if example is not None:
            chosen.append(example)
            used += len(example.tokens)
