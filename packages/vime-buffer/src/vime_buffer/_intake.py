"""What is read off a group when it is handed in: its index, its versions, its failures, its payloads."""

from __future__ import annotations

import dataclasses

import numpy as np

from vime_buffer._rules import oldest_number
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2
from vime_proto.sample.v1 import sample_pb2

FAILED_STATUSES = (sample_pb2.ROLLOUT_STATUS_FAILED, sample_pb2.ROLLOUT_STATUS_ABORTED)


@dataclasses.dataclass(frozen=True)
class SamplePayload:
    """A sample cut in two.

    Attributes:
        sample_id: of the sample.
        body: serialised Sample; its routing trace, if any, holds the header alone.
        trace: bytes of the routing trace when they came inline.
        blob_id, uri: where they lie otherwise.
    """

    sample_id: str
    body: bytes
    trace: bytes | None
    blob_id: str
    uri: str
    routing_bytes: int


@dataclasses.dataclass(frozen=True)
class Intake:
    """A group, read once.

    Attributes:
        index: as LeaseBatch answers it.
        versions: distinct (lineage, number) of its generated segments, in order of appearance.
        failures: stage and message of each rollout that failed.
        payloads: by sample, in order.
        sample_fields, blob_fields: field paths by sample id and blob id, for errors.
    """

    index: pb.GroupIndex
    versions: tuple[tuple[int, int], ...]
    failures: list[tuple[str, str]]
    payloads: list[SamplePayload]
    sample_fields: dict[str, str]
    blob_fields: dict[str, str]

    @property
    def oldest(self) -> int | None:
        return oldest_number(self.versions)


def token_count(segment: sample_pb2.Segment) -> int:
    """Tokens of a segment."""
    return segment.token_ids.shape[0] if segment.token_ids.shape else 0


def trainable_count(segment: sample_pb2.Segment) -> int:
    """Tokens of a segment that the loss may use."""
    if segment.WhichOneof("trainable") == "trainable_mask":
        return int(np.count_nonzero(np.frombuffer(segment.trainable_mask.data, dtype=np.uint8)))
    return token_count(segment) if segment.trainable_all else 0


def generated_tokens(rollout: sample_pb2.Rollout) -> int:
    """Tokens that the model sampled in a rollout."""
    return sum(
        token_count(segment)
        for sample in rollout.samples
        for segment in sample.segments
        if segment.role == sample_pb2.SEGMENT_ROLE_MODEL
    )


def take_in(group: sample_pb2.Group, attempt: int) -> Intake:
    """Reads a valid group."""
    index = pb.GroupIndex(group_id=group.group_id, prompt_id=group.prompt.prompt_id, attempt=attempt)
    versions: dict[tuple[int, int], None] = {}
    failures: list[tuple[str, str]] = []
    payloads: list[SamplePayload] = []
    sample_fields: dict[str, str] = {}
    blob_fields: dict[str, str] = {}
    for i, rollout in enumerate(group.rollouts):
        entry = index.rollouts.add(
            rollout_id=rollout.rollout_id,
            status=rollout.status,
            reliable=rollout.reliable if rollout.HasField("reliable") else True,
            rewards=rollout.rewards,
        )
        if rollout.HasField("reward"):
            entry.reward = rollout.reward
        if rollout.status in FAILED_STATUSES:
            stage = rollout.failure.stage or ("aborted" if not rollout.HasField("failure") else "unknown")
            failures.append((stage, rollout.failure.message))
        for j, sample in enumerate(rollout.samples):
            field = f"group.rollouts[{i}].samples[{j}]"
            sample_fields[sample.sample_id] = f"{field}.sample_id"
            payload = _cut(sample)
            payloads.append(payload)
            if payload.blob_id:
                blob_fields[payload.blob_id] = f"{field}.routing.blob_id"
            described = _describe(sample)
            described.bytes = len(payload.body) + payload.routing_bytes
            described.routing_bytes = payload.routing_bytes
            entry.samples.append(described)
            for spent in described.versions:
                versions[spent.version.lineage, spent.version.number] = None
    return Intake(index, tuple(versions), failures, payloads, sample_fields, blob_fields)


def _describe(sample: sample_pb2.Sample) -> pb.SampleIndex:
    described = pb.SampleIndex(sample_id=sample.sample_id)
    last: common_pb2.PolicyVersion | None = None
    for segment in sample.segments:
        count = token_count(segment)
        described.tokens += count
        described.trainable_tokens += trainable_count(segment)
        if not segment.generation.HasField("version"):
            continue
        version = segment.generation.version
        if version == last:
            described.versions[-1].tokens += count
        else:
            described.versions.add(version=version, tokens=count)
            last = version
    return described


def _cut(sample: sample_pb2.Sample) -> SamplePayload:
    kind = sample.routing.WhichOneof("payload") if sample.HasField("routing") else None
    if kind is None:
        return SamplePayload(sample.sample_id, sample.SerializeToString(), None, "", "", 0)
    routing = sample.routing
    trace = routing.inline if kind == "inline" else None
    blob_id, uri = routing.blob_id, routing.uri
    bare = sample_pb2.Sample(sample_id=sample.sample_id, segments=sample.segments)
    bare.routing.header.CopyFrom(routing.header)
    size = len(trace) if trace is not None else routing.header.payload_length
    return SamplePayload(sample.sample_id, bare.SerializeToString(), trace, blob_id, uri, size)
