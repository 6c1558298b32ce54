"""Samples to per-token columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import truncates, validate_sample

from ._index import BatchIndex

# What changes the distribution, and the value that does not. Before the fewest tokens a stop has no probability at all.
_NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}


class RefusedSamplesError(ValueError):
    """Samples that must not be trained on, such as one with a NaN log-prob.

    Attributes:
        refused: reason by sample id.
    """

    def __init__(self, refused: Mapping[str, str]):
        self.refused = dict(refused)
        super().__init__("; ".join(f"sample {name!r}: {reason}" for name, reason in self.refused.items()))


class UnsupportedSamplingError(ValueError):
    """Samples were drawn in a way whose log-probs the trainer cannot compute: the run's configuration is wrong."""


@dataclass(frozen=True)
class Columns:
    """S samples, T tokens end to end, in the index's order.

    Attributes:
        tokens: int64 [T].
        trainable: bool [T], as the samples say; whether their rollout is usable is not looked at.
        engine_logprobs: float32 [T], 0 at given tokens.
        temperature: float32 [T], 1 at given tokens.
        teacher_logprobs: float32 [T], 0 at given tokens; None unless they were asked for.
        versions: int64 [T], number of the weights that generated each token, -1 at given tokens; None unless asked for.
        starts, lengths: int64 [S].
        routing: S traces; None where a sample has none.
    """

    tokens: np.ndarray
    trainable: np.ndarray
    engine_logprobs: np.ndarray
    temperature: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    routing: tuple[routing_pb2.RoutingTrace | None, ...]
    teacher_logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None

    def slice_of(self, sample: int) -> slice:
        """Where a sample's tokens lie."""
        start = int(self.starts[sample])
        return slice(start, start + int(self.lengths[sample]))


def read_columns(
    index: BatchIndex,
    samples: Mapping[str, sample_pb2.Sample],
    vocab_size: int | None = None,
    teacher: bool = False,
    versions: bool = False,
) -> Columns:
    """Checks and lays out the samples of a batch, one Python step a segment, none a token.

    Args:
        index: the batch.
        samples: by id.
        vocab_size: token ids are below it.
        teacher: read the teacher's log-probs; every segment with a trainable token must bring them.
        versions: read the version of each token.

    Raises:
        RefusedSamplesError: samples that break their contract or do not fit the index; names each.
        UnsupportedSamplingError: truncated or penalised sampling, a least length, or raw log-probs at a temperature other than 1.
    """
    refused: dict[str, str] = {}
    kept: list[sample_pb2.Sample] = []
    for name, tokens, trainable in zip(index.sample_ids, index.lengths.tolist(), index.trainable.tolist(), strict=True):
        sample = samples.get(name)
        try:
            if sample is None:
                raise ContractError("sample", "not delivered by the buffer")
            validate_sample(sample, vocab_size=vocab_size)
            _check_counts(sample, tokens, trainable)
            if teacher:
                _check_teacher(sample)
        except ContractError as error:
            refused[name] = f"{error}{_requests(sample)}"
        else:
            kept.append(sample)
    if refused:
        raise RefusedSamplesError(refused)
    total = int(index.lengths.sum())
    columns = Columns(
        tokens=np.zeros(total, np.int64),
        trainable=np.zeros(total, bool),
        engine_logprobs=np.zeros(total, np.float32),
        temperature=np.ones(total, np.float32),
        starts=np.cumsum(index.lengths) - index.lengths,
        lengths=index.lengths,
        routing=tuple(sample.routing if sample.HasField("routing") else None for sample in kept),
        teacher_logprobs=np.zeros(total, np.float32) if teacher else None,
        versions=np.full(total, -1, np.int64) if versions else None,
    )
    checked: set[bytes] = set()
    at = 0
    for sample in kept:
        for segment in sample.segments:
            at = _write(segment, columns, at, checked, sample.sample_id)
    return columns


def _requests(sample: sample_pb2.Sample | None) -> str:
    """Which engine requests a sample came from, for the search in their logs."""
    segments = [] if sample is None else [one.generation for one in sample.segments if one.HasField("generation")]
    named = [f"{one.request_id} of {one.engine_id}" for one in segments if one.request_id]
    return f" (requests: {', '.join(named)})" if named else ""


def _check_counts(sample: sample_pb2.Sample, tokens: int, trainable: int) -> None:
    # Shapes were validated: the first dimension is the number of tokens.
    have = sum(segment.token_ids.shape[0] for segment in sample.segments)
    if have != tokens:
        raise ContractError("sample.segments", f"{have} tokens, but the index says {tokens}")
    counted = sum(
        segment.token_ids.shape[0] if segment.trainable_all else segment.trainable_mask.data.count(b"\x01")
        for segment in sample.segments
    )
    if counted != trainable:
        raise ContractError("sample.segments", f"{counted} trainable tokens, but the index says {trainable}")


def _check_teacher(sample: sample_pb2.Sample) -> None:
    for at, segment in enumerate(sample.segments):
        trained = segment.trainable_all or b"\x01" in segment.trainable_mask.data
        if trained and segment.token_ids.shape[0] and not segment.generation.HasField("teacher_logprobs"):
            raise ContractError(
                f"sample.segments[{at}].generation.teacher_logprobs", "missing, and the algorithm needs it"
            )


def _write(segment: sample_pb2.Segment, columns: Columns, at: int, checked: set[bytes], sample_id: str) -> int:
    count = segment.token_ids.shape[0]
    here = slice(at, at + count)
    columns.tokens[here] = np.frombuffer(segment.token_ids.data, "<i4")
    if segment.WhichOneof("trainable") == "trainable_mask":
        columns.trainable[here] = np.frombuffer(segment.trainable_mask.data, np.bool_)
    else:
        columns.trainable[here] = segment.trainable_all
    if segment.HasField("generation"):
        generation = segment.generation
        columns.engine_logprobs[here] = np.frombuffer(generation.logprobs.data, "<f4")
        if columns.teacher_logprobs is not None and generation.HasField("teacher_logprobs"):
            columns.teacher_logprobs[here] = np.frombuffer(generation.teacher_logprobs.data, "<f4")
        if columns.versions is not None:
            columns.versions[here] = generation.version.number
        sampling = generation.sampling
        columns.temperature[here] = sampling.temperature if sampling.HasField("temperature") else 1.0
        key = sampling.SerializeToString(deterministic=True) + bytes([generation.logprob_mode])
        if key not in checked:
            _check_sampling(generation, sample_id)
            checked.add(key)
    return at + count


def _check_sampling(generation: sample_pb2.Generation, sample_id: str) -> None:
    sampling = generation.sampling
    about = f"(sample {sample_id!r}, engine {generation.engine_id!r})"
    if truncates(sampling):
        raise UnsupportedSamplingError(
            "sampling.top_p, top_k, min_p: log-probs are of the truncated distribution, which the trainer does not "
            f"recompute; leave truncation off for training {about}"
        )
    for name, neutral in _NEUTRAL.items():
        if sampling.HasField(name) and getattr(sampling, name) != neutral:
            raise UnsupportedSamplingError(
                f"sampling.{name}: {getattr(sampling, name)} changes the distribution that log-probs are of, and the "
                f"trainer does not recompute it; leave it at {neutral} for training {about}"
            )
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if generation.logprob_mode == sample_pb2.LOGPROB_MODE_RAW and temperature != 1.0:
        raise UnsupportedSamplingError(
            f"generation.logprob_mode: RAW log-probs at temperature {temperature} are not of the distribution that was "
            f"sampled from; ask the engine for PROCESSED ones {about}"
        )
