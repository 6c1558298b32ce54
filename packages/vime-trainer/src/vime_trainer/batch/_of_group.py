"""A group's index, from its content: what a buffer answers, for groups that come from a file."""

from __future__ import annotations

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import validate_group


def index_group(group: sample_pb2.Group) -> buffer_pb2.GroupIndex:
    """Counts tokens, trainable tokens and versions of each sample.

    Raises:
        ContractError: the group breaks its contract.
    """
    validate_group(group)
    index = buffer_pb2.GroupIndex(group_id=group.group_id, prompt_id=group.prompt.prompt_id or group.group_id)
    for rollout in group.rollouts:
        entry = index.rollouts.add(
            rollout_id=rollout.rollout_id,
            rewards=rollout.rewards,
            status=rollout.status,
            reliable=rollout.reliable if rollout.HasField("reliable") else True,
        )
        if rollout.HasField("reward"):
            entry.reward = rollout.reward
        for sample in rollout.samples:
            _index_sample(sample, entry.samples.add(sample_id=sample.sample_id))
        index.attempt = max(index.attempt, rollout.attempt)
    return index


def _index_sample(sample: sample_pb2.Sample, entry: buffer_pb2.SampleIndex) -> None:
    entry.bytes = sample.ByteSize()
    entry.routing_bytes = sample.routing.header.payload_length
    for segment in sample.segments:
        count = segment.token_ids.shape[0]
        entry.tokens += count
        if segment.WhichOneof("trainable") == "trainable_mask":
            entry.trainable_tokens += int(np.frombuffer(segment.trainable_mask.data, np.bool_).sum())
        elif segment.trainable_all:
            entry.trainable_tokens += count
        if segment.HasField("generation"):
            entry.versions.add(version=segment.generation.version, tokens=count)
