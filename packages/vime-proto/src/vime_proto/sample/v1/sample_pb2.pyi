from vime_proto.common.v1 import common_pb2 as _common_pb2
from vime_proto.routing.v1 import routing_pb2 as _routing_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SegmentRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_ROLE_UNSPECIFIED: _ClassVar[SegmentRole]
    SEGMENT_ROLE_PROMPT: _ClassVar[SegmentRole]
    SEGMENT_ROLE_MODEL: _ClassVar[SegmentRole]
    SEGMENT_ROLE_TOOL: _ClassVar[SegmentRole]
    SEGMENT_ROLE_TEMPLATE: _ClassVar[SegmentRole]

class LogprobMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROB_MODE_UNSPECIFIED: _ClassVar[LogprobMode]
    LOGPROB_MODE_RAW: _ClassVar[LogprobMode]
    LOGPROB_MODE_PROCESSED: _ClassVar[LogprobMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class RolloutStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_STATUS_UNSPECIFIED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_COMPLETED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_TRUNCATED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_ABORTED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_FAILED: _ClassVar[RolloutStatus]
SEGMENT_ROLE_UNSPECIFIED: SegmentRole
SEGMENT_ROLE_PROMPT: SegmentRole
SEGMENT_ROLE_MODEL: SegmentRole
SEGMENT_ROLE_TOOL: SegmentRole
SEGMENT_ROLE_TEMPLATE: SegmentRole
LOGPROB_MODE_UNSPECIFIED: LogprobMode
LOGPROB_MODE_RAW: LogprobMode
LOGPROB_MODE_PROCESSED: LogprobMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
ROLLOUT_STATUS_UNSPECIFIED: RolloutStatus
ROLLOUT_STATUS_COMPLETED: RolloutStatus
ROLLOUT_STATUS_TRUNCATED: RolloutStatus
ROLLOUT_STATUS_ABORTED: RolloutStatus
ROLLOUT_STATUS_FAILED: RolloutStatus

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop_token_ids", "stop", "include_stop", "ignore_eos", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    ignore_eos: bool
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: bool = ..., ignore_eos: bool = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ...) -> None: ...

class RaggedTensor(_message.Message):
    __slots__ = ("values", "offsets")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    values: _common_pb2.Tensor
    offsets: _common_pb2.Tensor
    def __init__(self, values: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., offsets: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _common_pb2.Tensor
    logprobs: _common_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("logprobs", "logprob_mode", "version", "sampling", "finish_reason", "stop_included", "kept_token_ids", "top_logprobs", "teacher_logprobs", "engine_id", "request_id", "cached_tokens")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_MODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_INCLUDED_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _common_pb2.Tensor
    logprob_mode: LogprobMode
    version: _common_pb2.PolicyVersion
    sampling: SamplingParams
    finish_reason: FinishReason
    stop_included: bool
    kept_token_ids: RaggedTensor
    top_logprobs: TopLogprobs
    teacher_logprobs: _common_pb2.Tensor
    engine_id: str
    request_id: str
    cached_tokens: int
    def __init__(self, logprobs: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., logprob_mode: _Optional[_Union[LogprobMode, str]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_included: bool = ..., kept_token_ids: _Optional[_Union[RaggedTensor, _Mapping]] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ..., teacher_logprobs: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("role", "token_ids", "trainable_all", "trainable_mask", "generation", "reward", "streams")
    class StreamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_ALL_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_MASK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    role: SegmentRole
    token_ids: _common_pb2.Tensor
    trainable_all: bool
    trainable_mask: _common_pb2.Tensor
    generation: Generation
    reward: float
    streams: _containers.MessageMap[str, _common_pb2.Tensor]
    def __init__(self, role: _Optional[_Union[SegmentRole, str]] = ..., token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., trainable_all: bool = ..., trainable_mask: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., reward: _Optional[float] = ..., streams: _Optional[_Mapping[str, _common_pb2.Tensor]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("sample_id", "segments", "routing")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    routing: _routing_pb2.RoutingTrace
    def __init__(self, sample_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., routing: _Optional[_Union[_routing_pb2.RoutingTrace, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("stage", "message", "retryable")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    message: str
    retryable: bool
    def __init__(self, stage: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("rollout_id", "attempt", "status", "failure", "rewards", "reward", "reliable", "samples", "metrics", "generate_seconds", "reward_seconds")
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    RELIABLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    GENERATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    status: RolloutStatus
    failure: Failure
    rewards: _containers.ScalarMap[str, float]
    reward: float
    reliable: bool
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    metrics: _containers.ScalarMap[str, float]
    generate_seconds: float
    reward_seconds: float
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., status: _Optional[_Union[RolloutStatus, str]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., rewards: _Optional[_Mapping[str, float]] = ..., reward: _Optional[float] = ..., reliable: bool = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., generate_seconds: _Optional[float] = ..., reward_seconds: _Optional[float] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("prompt_id", "text", "messages_json", "token_ids", "answer", "reward", "record_json", "dataset", "row", "epoch", "group_size", "sampling")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    text: str
    messages_json: str
    token_ids: _common_pb2.Tensor
    answer: str
    reward: str
    record_json: str
    dataset: str
    row: int
    epoch: int
    group_size: int
    sampling: SamplingParams
    def __init__(self, prompt_id: _Optional[str] = ..., text: _Optional[str] = ..., messages_json: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., answer: _Optional[str] = ..., reward: _Optional[str] = ..., record_json: _Optional[str] = ..., dataset: _Optional[str] = ..., row: _Optional[int] = ..., epoch: _Optional[int] = ..., group_size: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group_id", "prompt", "rollouts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt: Prompt
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, group_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...
