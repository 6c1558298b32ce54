"""Prompts, samples, rollouts and groups."""

from __future__ import annotations

import json

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy
from vime_proto.validate import _fields as fields
from vime_proto.validate._routing import validate_trace
from vime_proto.validate._sampling import truncates, validate_sampling


def validate_prompt(prompt: pb.Prompt, field: str = "prompt") -> None:
    """Checks a prompt: an id, an input, JSON where JSON is stated, sampling overrides in range.

    Raises:
        ContractError: names the field and the prompt.
    """
    fields.text(prompt.prompt_id, f"{field}.prompt_id")
    about = f" (prompt {prompt.prompt_id!r})"
    kind = prompt.WhichOneof("input")
    if kind is None:
        raise ContractError(f"{field}.input", f"one of text, messages_json, token_ids must be set{about}")
    if kind == "text":
        fields.text(prompt.text, f"{field}.text")
    elif kind == "token_ids":
        fields.token_ids(prompt.token_ids, f"{field}.token_ids", about, least=1)
    else:
        messages = _json(prompt.messages_json, f"{field}.messages_json", about)
        if not (
            isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages)
        ):
            raise ContractError(f"{field}.messages_json", f"must be a JSON array of messages with a role{about}")
    if prompt.record_json and not isinstance(_json(prompt.record_json, f"{field}.record_json", about), dict):
        raise ContractError(f"{field}.record_json", f"must be a JSON object{about}")
    if prompt.HasField("sampling"):
        validate_sampling(prompt.sampling, f"{field}.sampling", evaluation=True, override=True)


def validate_sample(
    sample: pb.Sample,
    rl: bool = True,
    field: str = "sample",
    vocab_size: int | None = None,
    evaluation: bool = False,
    need_kept_set: bool = False,
) -> None:
    """Checks one sample: the first segment is a PROMPT, every per-token field has the segment's length, every number is finite.

    Args:
        sample: the message.
        rl: whether each trainable token must be generated, with log-probs and version. False checks given text (SFT).
        field: how errors name it.
        vocab_size: token ids must be below it; None skips that.
        evaluation: whether greedy sampling is allowed.
        need_kept_set: whether truncated sampling must bring the kept ids.

    Raises:
        ContractError: names the field and the sample.
    """
    fields.text(sample.sample_id, f"{field}.sample_id")
    about = f" (sample {sample.sample_id!r})"
    if not sample.segments:
        raise ContractError(f"{field}.segments", f"must not be empty{about}")
    tokens = 0
    with fields.naming(about):
        for index, segment in enumerate(sample.segments):
            name = f"{field}.segments[{index}]"
            if index == 0 and segment.role != pb.SEGMENT_ROLE_PROMPT:
                raise ContractError(f"{name}.role", "the first segment must be a PROMPT")
            tokens += _segment(segment, rl, name, about, vocab_size, evaluation, need_kept_set)
        if sample.HasField("routing"):
            validate_trace(sample.routing, f"{field}.routing", tokens=tokens)


def _segment(segment, rl: bool, name: str, about: str, vocab_size, evaluation: bool, need_kept_set: bool) -> int:
    if segment.role not in pb.SegmentRole.values() or segment.role == pb.SEGMENT_ROLE_UNSPECIFIED:
        raise ContractError(f"{name}.role", f"must be one of {', '.join(pb.SegmentRole.keys()[1:])}{about}")
    if not segment.HasField("token_ids"):
        raise ContractError(f"{name}.token_ids", f"must be set, also when it is empty{about}")
    least = 1 if segment.role == pb.SEGMENT_ROLE_PROMPT else 0
    length = len(fields.token_ids(segment.token_ids, f"{name}.token_ids", about, least, vocab_size))
    trainable = segment.trainable_all and length > 0
    if segment.WhichOneof("trainable") == "trainable_mask":
        mask = to_numpy(segment.trainable_mask, f"{name}.trainable_mask", common.DTYPE_BOOL, (length,))
        if length and mask.view(np.uint8).max() > 1:
            raise ContractError(f"{name}.trainable_mask", f"bytes must be 0 or 1{about}")
        trainable = bool(mask.any())
    if segment.HasField("reward"):
        fields.finite(segment.reward, f"{name}.reward", about)
    for key in segment.streams:
        stream = to_numpy(segment.streams[key], f"{name}.streams[{key!r}]")
        if not stream.ndim or stream.shape[0] != length:
            raise ContractError(
                f"{name}.streams[{key!r}].shape", f"must start with {length}, got {list(stream.shape)}{about}"
            )
    if segment.HasField("generation"):
        if segment.role != pb.SEGMENT_ROLE_MODEL:
            raise ContractError(f"{name}.generation", f"only MODEL segments are generated{about}")
        _generation(segment.generation, length, rl, f"{name}.generation", about, vocab_size, evaluation, need_kept_set)
    elif rl and segment.role == pb.SEGMENT_ROLE_MODEL:
        raise ContractError(f"{name}.generation", f"must be set on a MODEL segment (log-probs and version){about}")
    elif rl and trainable:
        raise ContractError(f"{name}.trainable", f"a token that was not generated cannot be trained by RL{about}")
    return length


def _generation(
    gen, length: int, rl: bool, name: str, about: str, vocab_size, evaluation: bool, need_kept_set: bool
) -> None:
    if gen.HasField("logprobs"):
        fields.logprobs(gen.logprobs, f"{name}.logprobs", about, length)
    elif rl:
        raise ContractError(f"{name}.logprobs", f"must be set, float32 [{length}]{about}")
    if rl or gen.HasField("version"):
        fields.version(gen, "version", f"{name}.version", about)
    if rl and gen.logprob_mode not in (pb.LOGPROB_MODE_RAW, pb.LOGPROB_MODE_PROCESSED):
        raise ContractError(f"{name}.logprob_mode", f"must be RAW or PROCESSED{about}")
    if gen.HasField("sampling"):
        validate_sampling(gen.sampling, f"{name}.sampling", evaluation=evaluation)
    elif rl:
        raise ContractError(f"{name}.sampling", f"must be set{about}")
    if gen.HasField("teacher_logprobs"):
        fields.logprobs(gen.teacher_logprobs, f"{name}.teacher_logprobs", about, length)
    if gen.HasField("top_logprobs"):
        validate_top_logprobs(gen.top_logprobs, length, f"{name}.top_logprobs")
    if gen.HasField("kept_token_ids"):
        validate_ragged(gen.kept_token_ids, length, f"{name}.kept_token_ids", vocab_size)
    elif need_kept_set and length and truncates(gen.sampling):
        raise ContractError(f"{name}.kept_token_ids", f"must be set when top-p, top-k or min-p is on{about}")


def validate_top_logprobs(
    top: pb.TopLogprobs, length: int, field: str = "top_logprobs", count: int | None = None
) -> None:
    """Checks alternatives: ids int32 [length, k] and log-probs float32 [length, k]; -inf is allowed here, NaN is not."""
    ids = to_numpy(top.token_ids, f"{field}.token_ids", common.DTYPE_INT32, (length, count))
    values = to_numpy(top.logprobs, f"{field}.logprobs", common.DTYPE_FLOAT32, (length, ids.shape[1]))
    if np.isnan(values).any():
        raise ContractError(f"{field}.logprobs", "must not hold NaN")


def validate_ragged(ragged: pb.RaggedTensor, rows: int, field: str, vocab_size: int | None = None) -> None:
    """Checks ragged token ids: offsets uint64 [rows + 1] start at 0, never fall, and end at the number of values."""
    values = fields.token_ids(ragged.values, f"{field}.values", "", 0, vocab_size)
    offsets = to_numpy(ragged.offsets, f"{field}.offsets", common.DTYPE_UINT64, (rows + 1,))
    if offsets[0] != 0 or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any():
        raise ContractError(f"{field}.offsets", f"must rise from 0 to {len(values)}")


def validate_rollout(rollout: pb.Rollout, rl: bool = True, field: str = "rollout", **options) -> None:
    """Checks one rollout: status, failure, finite rewards, each sample. `options` go to validate_sample.

    Raises:
        ContractError: names the field, the rollout and the sample.
    """
    fields.text(rollout.rollout_id, f"{field}.rollout_id")
    about = f" (rollout {rollout.rollout_id!r})"
    if rollout.status not in pb.RolloutStatus.values() or rollout.status == pb.ROLLOUT_STATUS_UNSPECIFIED:
        raise ContractError(f"{field}.status", f"must be one of {', '.join(pb.RolloutStatus.keys()[1:])}{about}")
    failed = rollout.status == pb.ROLLOUT_STATUS_FAILED
    if failed != rollout.HasField("failure"):
        raise ContractError(f"{field}.failure", f"must be set if and only if status is FAILED{about}")
    if failed:
        fields.text(rollout.failure.stage, f"{field}.failure.stage")
    for name, value in rollout.rewards.items():
        fields.finite(value, f"{field}.rewards[{name!r}]", about)
    if rollout.HasField("reward"):
        fields.finite(rollout.reward, f"{field}.reward", about)
    for index, sample in enumerate(rollout.samples):
        validate_sample(sample, rl, f"{field}.samples[{index}]", **options)


def validate_group(
    group: pb.Group,
    rl: bool = True,
    field: str = "group",
    group_size: int | None = None,
    need_reward: bool = True,
    **options,
) -> None:
    """Checks a finished group: ids unique within it, the group's id is the prompt's, as many rollouts as wanted.

    Args:
        group: the message.
        rl: as in validate_sample.
        field: how errors name it.
        group_size: rollouts wanted; fewer or more are refused (a failed one counts). None skips that.
        need_reward: whether every COMPLETED and TRUNCATED rollout must have a reward.
        options: go to validate_sample.

    Raises:
        ContractError: names the field and the ids.
    """
    fields.text(group.group_id, f"{field}.group_id")
    if not group.HasField("prompt"):
        raise ContractError(f"{field}.prompt", f"must be set (group {group.group_id!r})")
    validate_prompt(group.prompt, f"{field}.prompt")
    if group.group_id != group.prompt.prompt_id:
        raise ContractError(
            f"{field}.group_id", f"must equal the prompt's id {group.prompt.prompt_id!r}, got {group.group_id!r}"
        )
    if group_size is not None and len(group.rollouts) != group_size:
        raise ContractError(
            f"{field}.rollouts", f"must be {group_size}, got {len(group.rollouts)} (group {group.group_id!r})"
        )
    for index, rollout in enumerate(group.rollouts):
        name = f"{field}.rollouts[{index}]"
        validate_rollout(rollout, rl, name, **options)
        scored = rollout.status in (pb.ROLLOUT_STATUS_COMPLETED, pb.ROLLOUT_STATUS_TRUNCATED)
        if need_reward and scored and not rollout.HasField("reward"):
            raise ContractError(f"{name}.reward", f"must be set; 0.0 is a value (rollout {rollout.rollout_id!r})")
    fields.unique((rollout.rollout_id for rollout in group.rollouts), field + ".rollouts[{}].rollout_id")
    fields.unique(
        (s.sample_id for rollout in group.rollouts for s in rollout.samples),
        field + ".rollouts[].samples[{}].sample_id",
    )


def _json(value: str, field: str, about: str):
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ContractError(field, f"is not JSON: {error}{about}") from None
