"""Messages for tests."""

from __future__ import annotations

import itertools
import uuid

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2 as s
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version

_numbers = itertools.count()
RUN = "run"


def rid() -> str:
    return uuid.uuid4().hex


def prompt(name: str, **fields) -> s.Prompt:
    return s.Prompt(prompt_id=name, text=f"what is {name}?", answer="1", **fields)


def generation(count: int, number: int, lineage: int = 0, run: str = RUN, temperature: float = 1.0) -> s.Generation:
    return s.Generation(
        logprobs=to_tensor(np.full(count, -0.5, np.float32)),
        logprob_mode=s.LOGPROB_MODE_PROCESSED,
        version=policy_version(run, lineage, number),
        sampling=s.SamplingParams(temperature=temperature, max_new_tokens=16),
        finish_reason=s.FINISH_REASON_STOP,
    )


def sample(sample_id: str, versions=((0, 0),), tokens: int = 4, routing=None, **options) -> s.Sample:
    """A sample with one MODEL segment per (lineage, number)."""
    segments = [s.Segment(role=s.SEGMENT_ROLE_PROMPT, token_ids=to_tensor(np.arange(3, dtype=np.int32)))]
    for lineage, number in versions:
        segments.append(
            s.Segment(
                role=s.SEGMENT_ROLE_MODEL,
                token_ids=to_tensor(np.arange(tokens, dtype=np.int32)),
                trainable_all=True,
                generation=generation(tokens, number, lineage, **options),
            )
        )
    return s.Sample(sample_id=sample_id, segments=segments, routing=routing)


def rollout(name: str, reward: float = 1.0, failed: bool = False, **options) -> s.Rollout:
    if failed:
        return s.Rollout(
            rollout_id=name,
            status=s.ROLLOUT_STATUS_FAILED,
            failure=s.Failure(stage="reward", message="grader died"),
        )
    return s.Rollout(
        rollout_id=name,
        attempt=1,
        status=s.ROLLOUT_STATUS_COMPLETED,
        reward=reward,
        rewards={"exact": reward},
        samples=[sample(f"{name}-s", **options)],
    )


def group(lease: pb.PromptLease, rewards=None, failed: int = 0, **options) -> s.Group:
    """A group for a lease; by default rewards alternate between 0 and 1, with the version that the lease asks for."""
    size = lease.group_size
    options.setdefault("versions", ((lease.minimum_version.lineage, lease.minimum_version.number),))
    rewards = rewards or [float(i % 2) for i in range(size)]
    key = f"{lease.prompt.prompt_id}-{lease.attempt}-{next(_numbers)}"
    return s.Group(
        group_id=lease.prompt.prompt_id,
        prompt=lease.prompt,
        rollouts=[rollout(f"{key}-{i}", rewards[i % len(rewards)], failed=i < failed, **options) for i in range(size)],
    )


def lineage(ordinal: int, parent: int | None = None, forked_at: int | None = None) -> common_pb2.Lineage:
    return common_pb2.Lineage(ordinal=ordinal, parent=parent, forked_at=forked_at)


def trace(rows: int, layers=(1, 2, 3, 5), top_k: int = 2, chunks=None, packed: bool = False):
    """A trace whose ids tell row and layer, and its ids as an array [rows, layers, top_k]."""
    import zstandard

    from vime_proto.checksum import checksum

    ids = np.zeros((rows, len(layers), top_k), np.uint8)
    ids[..., 0] = np.arange(rows)[:, None] % 16
    ids[..., 1] = np.arange(len(layers))[None, :] + 16
    header = routing_pb2.RoutingTraceHeader(
        experts=64, top_k=top_k, layer_ids=layers, rows=rows, dtype=common_pb2.DTYPE_UINT8
    )
    payload = b""
    for (row, row_stop), (layer, layer_stop) in chunks or [((0, rows), (0, len(layers)))]:
        raw = ids[row:row_stop, layer:layer_stop].tobytes()
        stored = zstandard.ZstdCompressor().compress(raw) if packed else raw
        header.chunks.add(
            rows=common_pb2.IndexRange(start=row, stop=row_stop),
            layers=common_pb2.IndexRange(start=layer, stop=layer_stop),
            stored=common_pb2.ByteRange(offset=len(payload), length=len(stored)),
            raw_length=len(raw),
            checksum=checksum(stored),
            compression=routing_pb2.COMPRESSION_ZSTD if packed else routing_pb2.COMPRESSION_NONE,
        )
        payload += stored
    header.payload_length = len(payload)
    header.spans.add(rows=common_pb2.IndexRange(start=0, stop=rows), version=policy_version(RUN, 0, 0))
    return routing_pb2.RoutingTrace(header=header, inline=payload), ids
