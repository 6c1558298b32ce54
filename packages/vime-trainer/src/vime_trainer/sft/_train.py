"""One optimizer step of supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vime_trainer.batch import TokenCost, plan_step
from vime_trainer.optim import Optimizer, StepResult
from vime_trainer.packed import PackedBatch, TokenOutputs, pack
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
    """Raises the mean log-probability of the learnt tokens of a batch; how it is cut does not change the gradient.

    All ranks call it with the same examples, of which each takes its share.
    """
    count = sum(int(example.learnt[1:].sum()) for example in examples)
    tokens = sum(len(example.tokens) for example in examples)
    here = policy.parallel
    cost = TokenCost.of_architecture(policy.arch)
    # Megatron's interleaved schedule takes as many micro-batches as it has stages at a time.
    multiple = here.pipeline_size if here.config.virtual > 1 else 1
    plan = _plan(examples, micro_tokens, here.data_size, policy.layout, multiple, cost)
    mine = list(_packed(examples, plan[here.data_rank]))
    losses: list[Tensor] = []

    def loss(i: int, outputs: TokenOutputs) -> Tensor:
        part = -outputs.logprobs.sum() / count
        losses.append(part.detach())
        return part

    optimizer.zero_grad()
    policy.run([batch for batch, _ in mine], [learnt for _, learnt in mine], loss)
    payload = None
    if here.is_last_stage:
        total = here.sum_data(np.array([sum(float(one) for one in losses)], np.float64))
        payload = json.dumps(float(total[0])).encode()
    whole = json.loads(here.from_last_stage(payload))
    return SftStep(whole, tokens, count, optimizer.step())


def micro_batches(
    examples: Sequence[Example], limit: int, layout: str = "packed"
) -> Iterator[tuple[PackedBatch, Tensor]]:
    """Packed batches of at most `limit` tokens (at least one row each), and masks, as one rank has them."""
    yield from _packed(examples, _plan(examples, limit, 1, layout)[0])


def _plan(examples: Sequence[Example], limit: int, data_size: int, layout: str, multiple: int = 1, cost=None):
    lengths = [len(example.tokens) for example in examples]
    return plan_step(lengths, range(len(lengths)), data_size, limit, layout, multiple, cost)


def _packed(examples: Sequence[Example], plan: Sequence[Sequence[int]]) -> Iterator[tuple[PackedBatch, Tensor]]:
    for rows in plan:
        chosen = [examples[row] for row in rows]
        if chosen:
            learnt = torch.from_numpy(np.concatenate([one.learnt for one in chosen]))
            yield pack([torch.from_numpy(one.tokens) for one in chosen]), learnt
        else:
            # A rank with less to do than another takes part with a token that is not learnt.
            yield pack([[0]]), torch.zeros(1, dtype=torch.bool)
