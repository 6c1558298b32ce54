"""Small valid messages for tests: prompts, samples, groups, routing traces, weight manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import itemsize, to_tensor
from vime_proto.validate import model_digest
from vime_proto.weights.v1 import weights_pb2


def ids(values: Sequence[int]) -> common.Tensor:
    """Token ids, int32 [n]."""
    return to_tensor(np.asarray(values, np.int32))


def floats(values: Sequence[float]) -> common.Tensor:
    """Log-probs, float32 [n]."""
    return to_tensor(np.asarray(values, np.float32))


def prompt(prompt_id: str, tokens: Sequence[int] = (1, 2, 3), **fields) -> pb.Prompt:
    """A prompt of token ids."""
    return pb.Prompt(prompt_id=prompt_id, token_ids=ids(tokens), **fields)


def sampling(**fields) -> pb.SamplingParams:
    """Temperature 1, at most 8 new tokens, unless stated."""
    return pb.SamplingParams(**{"temperature": 1.0, "max_new_tokens": 8, **fields})


def prompt_segment(tokens: Sequence[int] = (1, 2, 3)) -> pb.Segment:
    """Given tokens, not trainable."""
    return pb.Segment(role=pb.SEGMENT_ROLE_PROMPT, token_ids=ids(tokens))


def model_segment(
    version: common.PolicyVersion, tokens: Sequence[int] = (0, 4), logprobs: Sequence[float] | None = None, **fields
) -> pb.Segment:
    """Generated tokens, all trainable. The first token has id 0 and log-prob 0.0: both are values."""
    given = logprobs if logprobs is not None else [0.0, *[-0.5] * (len(tokens) - 1)][: len(tokens)]
    generation = pb.Generation(
        logprobs=floats(given),
        logprob_mode=pb.LOGPROB_MODE_PROCESSED,
        version=version,
        sampling=sampling(),
        finish_reason=pb.FINISH_REASON_STOP,
        stop_included=True,
        engine_id="engine-0",
        cached_tokens=0,
    )
    return pb.Segment(
        role=pb.SEGMENT_ROLE_MODEL, token_ids=ids(tokens), trainable_all=True, generation=generation, **fields
    )


def sample(sample_id: str, version: common.PolicyVersion, **fields) -> pb.Sample:
    """A prompt of 3 tokens and 2 generated ones."""
    return pb.Sample(sample_id=sample_id, segments=[prompt_segment(), model_segment(version, **fields)])


def group(
    lease: buffer_pb2.PromptLease, version: common.PolicyVersion, rewards: Sequence[float] | None = None, tag: str = ""
) -> pb.Group:
    """A finished group for a lease; rewards count up from 0.0 unless stated. `tag` tells several answers apart."""
    given = list(rewards) if rewards is not None else [float(i) for i in range(lease.group_size)]
    result = pb.Group(group_id=lease.prompt.prompt_id, prompt=lease.prompt)
    for index, reward in enumerate(given):
        name = f"{lease.prompt.prompt_id}/{lease.attempt}{tag}/{index}"
        result.rollouts.add(
            rollout_id=name,
            attempt=lease.attempt,
            status=pb.ROLLOUT_STATUS_COMPLETED,
            rewards={"exact": reward},
            reward=reward,
            samples=[sample(f"{name}/s", version)],
        )
    return result


def failed_group(lease: buffer_pb2.PromptLease, stage: str = "generate") -> pb.Group:
    """A group whose every rollout failed."""
    result = pb.Group(group_id=lease.prompt.prompt_id, prompt=lease.prompt)
    for index in range(lease.group_size):
        result.rollouts.add(
            rollout_id=f"{lease.prompt.prompt_id}/{lease.attempt}/{index}",
            attempt=lease.attempt,
            status=pb.ROLLOUT_STATUS_FAILED,
            failure=pb.Failure(stage=stage, message="made to fail", retryable=True),
        )
    return result


def trace(
    routes: np.ndarray,
    version: common.PolicyVersion,
    experts: int,
    layer_ids: Sequence[int] | None = None,
    rows_per_chunk: int | None = None,
) -> routing_pb2.RoutingTrace:
    """An uncompressed trace with inline payload of routes [rows, layers, top_k]."""
    rows, layers, top_k = routes.shape
    dtype = common.DTYPE_UINT8 if experts <= 256 else common.DTYPE_UINT16
    header = routing_pb2.RoutingTraceHeader(
        experts=experts, top_k=top_k, layer_ids=layer_ids or range(layers), rows=rows, dtype=dtype
    )
    if rows:
        header.spans.add(rows=common.IndexRange(start=0, stop=rows), version=version)
    payload = b""
    for start in range(0, rows, rows_per_chunk or max(rows, 1)):
        part = routes[start : start + (rows_per_chunk or rows)].astype(f"<u{itemsize(dtype)}").tobytes()
        header.chunks.add(
            rows=common.IndexRange(start=start, stop=min(rows, start + (rows_per_chunk or rows))),
            layers=common.IndexRange(start=0, stop=layers),
            stored=common.ByteRange(offset=len(payload), length=len(part)),
            raw_length=len(part),
            checksum=checksum(part),
            compression=routing_pb2.COMPRESSION_NONE,
        )
        payload += part
    header.payload_length = len(payload)
    return routing_pb2.RoutingTrace(header=header, inline=payload)


def plan(names: Sequence[str], sources: int = 1, chunk_tensors: int | None = None) -> dict[str, list[list[str]]]:
    """Deals tensors out to sources in turn: names of each chunk, by source.

    Args:
        names: tensors.
        sources: sending ranks; those beyond the number of tensors have nothing to send.
        chunk_tensors: tensors in a chunk; None puts all of a source into one.
    """
    result = {}
    for index in range(sources):
        mine = list(names[index::sources])
        step = chunk_tensors or max(len(mine), 1)
        result[f"rank-{index}"] = [mine[first : first + step] for first in range(0, len(mine), step)]
    return result


def manifest(
    update_id: str,
    version: common.PolicyVersion,
    tensors: Mapping[str, tuple[np.ndarray, int]],
    chunks: Mapping[str, Sequence[Sequence[str]]] | None = None,
    base: common.PolicyVersion | None = None,
    checksums: bool = True,
) -> tuple[weights_pb2.WeightManifest, dict[str, list[bytes]]]:
    """A manifest of whole tensors, and the bytes of each source's chunks.

    Args:
        update_id: of the update.
        version: after Commit.
        tensors: array (bits, for bfloat16) and Dtype by name.
        chunks: names of each chunk, by source; None puts all into one chunk of one source.
        base: version that a delta applies to.
        checksums: whether chunks carry one.
    """
    result = weights_pb2.WeightManifest(update_id=update_id, version=version, base_version=base)
    streams: dict[str, list[bytes]] = {}
    for source_id, parts in (plan(list(tensors)) if chunks is None else chunks).items():
        source = result.sources.add(source_id=source_id)
        offset = 0
        streams[source_id] = []
        for names in parts:
            part, begin = b"", offset
            for name in names:
                array, dtype = tensors[name]
                data = np.ascontiguousarray(array).tobytes()
                spec = result.tensors.add(name=name, dtype=dtype, shape=array.shape)
                spec.pieces.add(source_id=source_id, bytes=common.ByteRange(offset=offset, length=len(data)))
                part, offset = part + data, offset + len(data)
            extent = common.ByteRange(offset=begin, length=len(part))
            chunk = source.chunks.add(index=len(source.chunks), bytes=extent, tensors=names)
            if checksums:
                chunk.checksum.CopyFrom(checksum(part))
            streams[source_id].append(part)
        source.total_bytes = offset
    result.model_digest = model_digest(result.tensors)
    return result, streams


def totals(streams: Mapping[str, Sequence[bytes]]) -> list[weights_pb2.SourceTotal]:
    """What Commit states of these chunks."""
    return [
        weights_pb2.SourceTotal(
            source_id=source,
            chunks=len(chunks),
            bytes=sum(map(len, chunks)),
            checksum=checksum(b"".join(chunks)),
        )
        for source, chunks in streams.items()
    ]
