"""What is derived from a sample: ids, masks, log-probs and versions, aligned to its tokens.

Per-token arrays are concatenated segment by segment; no Python loop touches a token. Messages are taken as valid
(`vime_proto.validate.validate_sample`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.common.v1.common_pb2 import PolicyVersion
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy


def segment_length(segment: pb.Segment) -> int:
    """Tokens of a segment."""
    return int(segment.token_ids.shape[0]) if segment.token_ids.shape else 0


def sample_length(sample: pb.Sample) -> int:
    """Tokens of a sample."""
    return sum(segment_length(segment) for segment in sample.segments)


def token_ids(sample: pb.Sample) -> np.ndarray:
    """Vocabulary ids, int32 [tokens]."""
    return _concatenate([to_numpy(s.token_ids, "token_ids") for s in sample.segments if segment_length(s)], np.int32)


def trainable_mask(sample: pb.Sample) -> np.ndarray:
    """Which tokens the loss may use, bool [tokens]."""
    return _concatenate([_segment_mask(s) for s in sample.segments], np.bool_)


def trainable_tokens(sample: pb.Sample) -> int:
    """Number of tokens that the loss may use."""
    return sum(int(_segment_mask(s).sum()) for s in sample.segments)


def generated_mask(sample: pb.Sample) -> np.ndarray:
    """Which tokens an engine generated, bool [tokens]."""
    return _concatenate([np.full(segment_length(s), s.HasField("generation")) for s in sample.segments], np.bool_)


def logprobs(sample: pb.Sample) -> np.ndarray:
    """Log-probabilities of the engine in nats, float32 [tokens]; NaN where nothing was generated."""
    return _generation_stream(sample, "logprobs")


def teacher_logprobs(sample: pb.Sample) -> np.ndarray:
    """Log-probabilities of the teacher in nats, float32 [tokens]; NaN where there are none."""
    return _generation_stream(sample, "teacher_logprobs")


def temperatures(sample: pb.Sample) -> np.ndarray:
    """Sampling temperature of each token, float32 [tokens]; 1 where none is stated and on tokens not generated."""
    parts = [np.full(segment_length(s), _temperature(s), np.float32) for s in sample.segments]
    return _concatenate(parts, np.float32)


def version_numbers(sample: pb.Sample) -> np.ndarray:
    """Version number of each generated token, int64 [tokens]; -1 where nothing was generated."""
    parts = [
        np.full(segment_length(s), s.generation.version.number if s.HasField("generation") else -1, np.int64)
        for s in sample.segments
    ]
    return _concatenate(parts, np.int64)


def segment_versions(sample: pb.Sample) -> list[tuple[PolicyVersion, int]]:
    """(version, generated tokens) of each generated segment in order; neighbours of one version are joined.

    A segment aborted before its first token still counts, with 0 tokens.
    """
    result: list[tuple[PolicyVersion, int]] = []
    for segment in _generated(sample):
        version = segment.generation.version
        if result and result[-1][0] == version:
            result[-1] = (version, result[-1][1] + segment_length(segment))
        else:
            result.append((version, segment_length(segment)))
    return result


def oldest_version(*samples: pb.Sample) -> PolicyVersion | None:
    """The version of the oldest generated segment (by lineage, then number); None when nothing was generated."""
    versions = [segment.generation.version for sample in samples for segment in _generated(sample)]
    return min(versions, key=lambda v: (v.lineage, v.number), default=None)


def group_samples(group: pb.Group) -> Iterator[pb.Sample]:
    """Every sample of a group, failed rollouts' included."""
    return (sample for rollout in group.rollouts for sample in rollout.samples)


def group_index(group: pb.Group) -> buffer_pb2.GroupIndex:
    """What a buffer says of a group without its content: rewards, status, tokens, versions and bytes of every sample.

    The attempt is the highest of its rollouts; `GroupIndex.attempt` of a lease may be set over it.
    """
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
            versions = [
                buffer_pb2.VersionTokens(version=version, tokens=count) for version, count in segment_versions(sample)
            ]
            entry.samples.add(
                sample_id=sample.sample_id,
                tokens=sample_length(sample),
                trainable_tokens=trainable_tokens(sample),
                versions=versions,
                bytes=sample.ByteSize(),
                routing_bytes=sample.routing.header.payload_length,
            )
        index.attempt = max(index.attempt, rollout.attempt)
    return index


def staleness(sample: pb.Sample, current: int) -> tuple[int, float] | None:
    """(worst, mean over generated tokens) lag in batches behind version number `current`; None when nothing was generated.

    The mean weighs each version by its tokens; a sample whose generated segments are all empty has its worst lag as mean.
    """
    pairs = [(current - version.number, tokens) for version, tokens in segment_versions(sample)]
    if not pairs:
        return None
    worst = max(lag for lag, _ in pairs)
    tokens = sum(count for _, count in pairs)
    return worst, sum(lag * count for lag, count in pairs) / tokens if tokens else float(worst)


def _generated(sample: pb.Sample) -> Iterator[pb.Segment]:
    return (segment for segment in sample.segments if segment.HasField("generation"))


def _segment_mask(segment: pb.Segment) -> np.ndarray:
    if segment.WhichOneof("trainable") == "trainable_mask":
        return to_numpy(segment.trainable_mask, "trainable_mask")
    return np.full(segment_length(segment), segment.trainable_all)


def _temperature(segment: pb.Segment) -> float:
    sampling = segment.generation.sampling
    return sampling.temperature if sampling.HasField("temperature") else 1.0


def _generation_stream(sample: pb.Sample, name: str) -> np.ndarray:
    parts = [
        to_numpy(getattr(segment.generation, name), name)
        if segment.generation.HasField(name)
        else np.full(segment_length(segment), np.nan, np.float32)
        for segment in sample.segments
    ]
    return _concatenate(parts, np.float32)


def _concatenate(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
