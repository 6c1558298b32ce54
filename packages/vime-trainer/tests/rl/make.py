"""Groups, batches and a tiny policy for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.common.v1 import common_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version
from vime_trainer.batch import BatchIndex, index_group
from vime_trainer.packed import PackedBatch, TokenOutputs

VOCAB = 16


def ids(values: Sequence[int]) -> common_pb2.Tensor:
    return to_tensor(np.asarray(values, np.int32))


def floats(values) -> common_pb2.Tensor:
    return to_tensor(np.asarray(values, np.float32))


def prompt(tokens: Sequence[int] = (1, 2)) -> sample_pb2.Segment:
    return sample_pb2.Segment(role=sample_pb2.SEGMENT_ROLE_PROMPT, token_ids=ids(tokens), trainable_all=False)


def tool(tokens: Sequence[int]) -> sample_pb2.Segment:
    return sample_pb2.Segment(role=sample_pb2.SEGMENT_ROLE_TOOL, token_ids=ids(tokens), trainable_all=False)


def answer(
    tokens: Sequence[int],
    logprobs=None,
    number: int = 0,
    lineage: int = 0,
    mask: Sequence[bool] | None = None,
    mode: int = sample_pb2.LOGPROB_MODE_PROCESSED,
    **sampling,
) -> sample_pb2.Segment:
    sampling = {"temperature": 1.0, "max_new_tokens": max(len(tokens), 1), **sampling}
    segment = sample_pb2.Segment(
        role=sample_pb2.SEGMENT_ROLE_MODEL,
        token_ids=ids(tokens),
        generation=sample_pb2.Generation(
            logprobs=floats([-1.0] * len(tokens) if logprobs is None else logprobs),
            logprob_mode=mode,
            version=policy_version("run", lineage, number),
            sampling=sample_pb2.SamplingParams(**sampling),
            finish_reason=sample_pb2.FINISH_REASON_STOP,
            stop_included=True,
            engine_id="engine-0",
            request_id="request-0",
        ),
    )
    if mask is None:
        segment.trainable_all = True
    else:
        segment.trainable_mask.CopyFrom(to_tensor(np.asarray(mask, np.bool_)))
    return segment


def sample(name: str, *segments: sample_pb2.Segment) -> sample_pb2.Sample:
    return sample_pb2.Sample(sample_id=name, segments=segments)


def rollout(
    name: str,
    reward: float | None,
    *samples: sample_pb2.Sample,
    status: int = sample_pb2.ROLLOUT_STATUS_COMPLETED,
    reliable: bool | None = None,
) -> sample_pb2.Rollout:
    made = sample_pb2.Rollout(rollout_id=name, attempt=1, status=status, samples=samples)
    if reward is not None:
        made.reward = reward
        made.rewards["exact"] = reward
    if reliable is not None:
        made.reliable = reliable
    if status == sample_pb2.ROLLOUT_STATUS_FAILED:
        made.failure.stage, made.failure.message = "reward", "it failed"
    return made


def group(name: str, *rollouts: sample_pb2.Rollout) -> sample_pb2.Group:
    return sample_pb2.Group(group_id=name, prompt=sample_pb2.Prompt(prompt_id=name, text=name), rollouts=rollouts)


def random_group(
    name: str,
    size: int,
    random: np.random.Generator,
    policy: TinyPolicy | None = None,
    number: int = 0,
    longest: int = 6,
) -> sample_pb2.Group:
    """A group of answers with random tokens; log-probs are the policy's, where one is given."""
    rollouts = []
    start = random.integers(1, VOCAB, random.integers(1, 4)).tolist()
    for i in range(size):
        tokens = random.integers(1, VOCAB, random.integers(1, longest + 1)).tolist()
        logprobs = None if policy is None else policy.score(start, tokens)
        rollouts.append(
            rollout(
                f"{name}.{i}",
                float(random.integers(0, 2)),
                sample(f"{name}.{i}.0", prompt(start), answer(tokens, logprobs, number=number)),
            )
        )
    return group(name, *rollouts)


def index_of(groups: Sequence[sample_pb2.Group], **options) -> BatchIndex:
    return BatchIndex.from_groups([index_group(one) for one in groups], **options)


def indices_of(groups: Sequence[sample_pb2.Group]) -> list[buffer_pb2.GroupIndex]:
    return [index_group(one) for one in groups]


def samples_of(groups: Sequence[sample_pb2.Group]) -> dict[str, sample_pb2.Sample]:
    return {one.sample_id: one for g in groups for r in g.rollouts for one in r.samples}


class TinyPolicy(torch.nn.Module):
    """Next-token logits from the token before and a running sum, so that the whole prefix matters."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, 8, generator=generator) * 0.5)
        self.head = torch.nn.Parameter(torch.randn(VOCAB, 8, generator=generator) * 0.5)

    def forward(self, batch: PackedBatch, wanted: torch.Tensor | None = None) -> TokenOutputs:
        hidden = self.embed[batch.tokens]
        lengths = batch.cu_seqlens.diff().tolist()
        parts = [part.cumsum(0).tanh() for part in hidden.split(lengths)]
        logits = torch.cat(parts) @ self.head.T
        # Token i is predicted by the position before it.
        logits = torch.cat([logits[:1], logits[:-1]]) / batch.temperature[:, None]
        logp = logits.log_softmax(-1)
        chosen = logp.gather(1, batch.tokens[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        first = batch.positions == 0
        if wanted is not None:
            first = first | ~wanted
        return TokenOutputs(chosen.masked_fill(first, 0.0), entropy.masked_fill(first, 0.0))

    def score(self, start: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        from vime_trainer.packed import pack

        with torch.no_grad():
            out = self.forward(pack([[*start, *tokens]], temperature))
        return out.logprobs[len(start) :].numpy()
