from vime_proto.common.v1 import common_pb2 as _common_pb2
from vime_proto.routing.v1 import routing_pb2 as _routing_pb2
from vime_proto.sample.v1 import sample_pb2 as _sample_pb2
from vime_proto.weights.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]
    ENGINE_STATE_RECEIVING: _ClassVar[EngineState]
    ENGINE_STATE_STALE: _ClassVar[EngineState]
    ENGINE_STATE_ASLEEP: _ClassVar[EngineState]
    ENGINE_STATE_AWAKE_WEIGHTS: _ClassVar[EngineState]

class InFlightPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_POLICY_UNSPECIFIED: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_ABORT: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_KEEP: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_WAIT: _ClassVar[InFlightPolicy]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_PAUSED: EngineState
ENGINE_STATE_RECEIVING: EngineState
ENGINE_STATE_STALE: EngineState
ENGINE_STATE_ASLEEP: EngineState
ENGINE_STATE_AWAKE_WEIGHTS: EngineState
IN_FLIGHT_POLICY_UNSPECIFIED: InFlightPolicy
IN_FLIGHT_POLICY_ABORT: InFlightPolicy
IN_FLIGHT_POLICY_KEEP: InFlightPolicy
IN_FLIGHT_POLICY_WAIT: InFlightPolicy

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "logprob_mode", "top_logprobs", "return_routing", "routing_start_row", "minimum_version", "session_id", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_MODE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTING_FIELD_NUMBER: _ClassVar[int]
    ROUTING_START_ROW_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _common_pb2.Tensor
    sampling: _sample_pb2.SamplingParams
    logprob_mode: _sample_pb2.LogprobMode
    top_logprobs: int
    return_routing: bool
    routing_start_row: int
    minimum_version: _common_pb2.PolicyVersion
    session_id: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., logprob_mode: _Optional[_Union[_sample_pb2.LogprobMode, str]] = ..., top_logprobs: _Optional[int] = ..., return_routing: bool = ..., routing_start_row: _Optional[int] = ..., minimum_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., session_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "top_logprobs", "version", "cached_tokens", "engine_id", "finish_reason", "stop_token_id", "stop_string", "stop_included", "routing", "kept_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_INCLUDED_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _common_pb2.Tensor
    logprobs: _common_pb2.Tensor
    top_logprobs: _sample_pb2.TopLogprobs
    version: _common_pb2.PolicyVersion
    cached_tokens: int
    engine_id: str
    finish_reason: _sample_pb2.FinishReason
    stop_token_id: int
    stop_string: str
    stop_included: bool
    routing: _routing_pb2.RoutingTrace
    kept_token_ids: _sample_pb2.RaggedTensor
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., top_logprobs: _Optional[_Union[_sample_pb2.TopLogprobs, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., engine_id: _Optional[str] = ..., finish_reason: _Optional[_Union[_sample_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., stop_included: bool = ..., routing: _Optional[_Union[_routing_pb2.RoutingTrace, _Mapping]] = ..., kept_token_ids: _Optional[_Union[_sample_pb2.RaggedTensor, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "start", "temperature", "top_logprobs", "return_routing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _common_pb2.Tensor
    start: int
    temperature: float
    top_logprobs: int
    return_routing: bool
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., start: _Optional[int] = ..., temperature: _Optional[float] = ..., top_logprobs: _Optional[int] = ..., return_routing: bool = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("logprobs", "top_logprobs", "routing", "version", "engine_id")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    logprobs: _common_pb2.Tensor
    top_logprobs: _sample_pb2.TopLogprobs
    routing: _routing_pb2.RoutingTrace
    version: _common_pb2.PolicyVersion
    engine_id: str
    def __init__(self, logprobs: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., top_logprobs: _Optional[_Union[_sample_pb2.TopLogprobs, _Mapping]] = ..., routing: _Optional[_Union[_routing_pb2.RoutingTrace, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., engine_id: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "experts", "top_k_experts", "moe_layer_ids", "version", "model_digest", "dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    experts: int
    top_k_experts: int
    moe_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    version: _common_pb2.PolicyVersion
    model_digest: str
    dtype: _common_pb2.Dtype
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., experts: _Optional[int] = ..., top_k_experts: _Optional[int] = ..., moe_layer_ids: _Optional[_Iterable[int]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., model_digest: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.Dtype, str]] = ...) -> None: ...

class EngineLayout(_message.Message):
    __slots__ = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel")
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int
    def __init__(self, tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., data_parallel: _Optional[int] = ..., expert_parallel: _Optional[int] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "state", "version", "running", "waiting", "kv_cache_usage", "layout", "gpu_uuids", "transports", "kernel_backends", "update_id", "sleep_level", "reason")
    class KernelBackendsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BACKENDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    state: EngineState
    version: _common_pb2.PolicyVersion
    running: int
    waiting: int
    kv_cache_usage: float
    layout: EngineLayout
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    kernel_backends: _containers.ScalarMap[str, str]
    update_id: str
    sleep_level: int
    reason: str
    def __init__(self, engine_id: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., layout: _Optional[_Union[EngineLayout, _Mapping]] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., transports: _Optional[_Iterable[str]] = ..., kernel_backends: _Optional[_Mapping[str, str]] = ..., update_id: _Optional[str] = ..., sleep_level: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("request_id", "in_flight", "wait_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    in_flight: InFlightPolicy
    wait_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., in_flight: _Optional[_Union[InFlightPolicy, str]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("status", "aborted")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    aborted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ..., aborted: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("request_id", "level", "in_flight", "wait_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    level: int
    in_flight: InFlightPolicy
    wait_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., level: _Optional[int] = ..., in_flight: _Optional[_Union[InFlightPolicy, str]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("request_id", "weights", "kv_cache")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    weights: bool
    kv_cache: bool
    def __init__(self, request_id: _Optional[str] = ..., weights: bool = ..., kv_cache: bool = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class InitTransportRequest(_message.Message):
    __slots__ = ("request_id", "config")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    config: _weights_pb2.TransportConfig
    def __init__(self, request_id: _Optional[str] = ..., config: _Optional[_Union[_weights_pb2.TransportConfig, _Mapping]] = ...) -> None: ...

class InitTransportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DestroyTransportRequest(_message.Message):
    __slots__ = ("request_id", "transport_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    transport_id: str
    def __init__(self, request_id: _Optional[str] = ..., transport_id: _Optional[str] = ...) -> None: ...

class DestroyTransportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginUpdateRequest(_message.Message):
    __slots__ = ("request_id", "manifest", "transport_id", "in_flight", "wait_seconds", "deadline_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    manifest: _weights_pb2.WeightManifest
    transport_id: str
    in_flight: InFlightPolicy
    wait_seconds: float
    deadline_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., manifest: _Optional[_Union[_weights_pb2.WeightManifest, _Mapping]] = ..., transport_id: _Optional[str] = ..., in_flight: _Optional[_Union[InFlightPolicy, str]] = ..., wait_seconds: _Optional[float] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("status", "aborted")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    aborted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ..., aborted: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadChunksRequest(_message.Message):
    __slots__ = ("request_id", "update_id", "source_id", "chunks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    update_id: str
    source_id: str
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., update_id: _Optional[str] = ..., source_id: _Optional[str] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadChunksResponse(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class SendChunksRequest(_message.Message):
    __slots__ = ("update_id", "source_id", "chunk", "offset", "data")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    source_id: str
    chunk: int
    offset: int
    data: bytes
    def __init__(self, update_id: _Optional[str] = ..., source_id: _Optional[str] = ..., chunk: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class SendChunksResponse(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class CommitUpdateRequest(_message.Message):
    __slots__ = ("request_id", "update_id", "totals", "stay_paused")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    STAY_PAUSED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    update_id: str
    totals: _containers.RepeatedCompositeFieldContainer[_weights_pb2.SourceTotal]
    stay_paused: bool
    def __init__(self, request_id: _Optional[str] = ..., update_id: _Optional[str] = ..., totals: _Optional[_Iterable[_Union[_weights_pb2.SourceTotal, _Mapping]]] = ..., stay_paused: bool = ...) -> None: ...

class CommitUpdateResponse(_message.Message):
    __slots__ = ("status", "bytes", "seconds")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    bytes: int
    seconds: float
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class AbortUpdateRequest(_message.Message):
    __slots__ = ("request_id", "update_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    update_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., update_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortUpdateResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...
