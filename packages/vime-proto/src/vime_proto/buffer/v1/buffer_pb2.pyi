from vime_proto.common.v1 import common_pb2 as _common_pb2
from vime_proto.sample.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeasePurpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_PURPOSE_UNSPECIFIED: _ClassVar[LeasePurpose]
    LEASE_PURPOSE_TRAIN: _ClassVar[LeasePurpose]
    LEASE_PURPOSE_EVALUATE: _ClassVar[LeasePurpose]

class LeaseOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_OUTCOME_UNSPECIFIED: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_GRANTED: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_EMPTY: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_END_OF_DATA: _ClassVar[LeaseOutcome]

class LeaseDirective(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_DIRECTIVE_UNSPECIFIED: _ClassVar[LeaseDirective]
    LEASE_DIRECTIVE_CONTINUE: _ClassVar[LeaseDirective]
    LEASE_DIRECTIVE_ABORT: _ClassVar[LeaseDirective]

class CommitOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_OUTCOME_UNSPECIFIED: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_READY: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_FILTERED: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_EXPIRED: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_RETRY: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_DROPPED: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_EVALUATED: _ClassVar[CommitOutcome]

class SampleField(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_FIELD_UNSPECIFIED: _ClassVar[SampleField]
    SAMPLE_FIELD_TOKENS: _ClassVar[SampleField]
    SAMPLE_FIELD_GENERATION: _ClassVar[SampleField]
    SAMPLE_FIELD_ROUTING: _ClassVar[SampleField]
    SAMPLE_FIELD_STREAMS: _ClassVar[SampleField]
LEASE_PURPOSE_UNSPECIFIED: LeasePurpose
LEASE_PURPOSE_TRAIN: LeasePurpose
LEASE_PURPOSE_EVALUATE: LeasePurpose
LEASE_OUTCOME_UNSPECIFIED: LeaseOutcome
LEASE_OUTCOME_GRANTED: LeaseOutcome
LEASE_OUTCOME_EMPTY: LeaseOutcome
LEASE_OUTCOME_END_OF_DATA: LeaseOutcome
LEASE_DIRECTIVE_UNSPECIFIED: LeaseDirective
LEASE_DIRECTIVE_CONTINUE: LeaseDirective
LEASE_DIRECTIVE_ABORT: LeaseDirective
COMMIT_OUTCOME_UNSPECIFIED: CommitOutcome
COMMIT_OUTCOME_READY: CommitOutcome
COMMIT_OUTCOME_FILTERED: CommitOutcome
COMMIT_OUTCOME_EXPIRED: CommitOutcome
COMMIT_OUTCOME_RETRY: CommitOutcome
COMMIT_OUTCOME_DROPPED: CommitOutcome
COMMIT_OUTCOME_EVALUATED: CommitOutcome
SAMPLE_FIELD_UNSPECIFIED: SampleField
SAMPLE_FIELD_TOKENS: SampleField
SAMPLE_FIELD_GENERATION: SampleField
SAMPLE_FIELD_ROUTING: SampleField
SAMPLE_FIELD_STREAMS: SampleField

class OpenRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "batch_groups", "group_size", "max_staleness", "seed", "lineage", "publish_interval", "max_attempts", "epochs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    batch_groups: int
    group_size: int
    max_staleness: int
    seed: int
    lineage: _common_pb2.Lineage
    publish_interval: int
    max_attempts: int
    epochs: int
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., batch_groups: _Optional[int] = ..., group_size: _Optional[int] = ..., max_staleness: _Optional[int] = ..., seed: _Optional[int] = ..., lineage: _Optional[_Union[_common_pb2.Lineage, _Mapping]] = ..., publish_interval: _Optional[int] = ..., max_attempts: _Optional[int] = ..., epochs: _Optional[int] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("trained", "version", "existed", "lineage", "source_rows")
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ROWS_FIELD_NUMBER: _ClassVar[int]
    trained: int
    version: _common_pb2.PolicyVersion
    existed: bool
    lineage: _common_pb2.Lineage
    source_rows: int
    def __init__(self, trained: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., existed: bool = ..., lineage: _Optional[_Union[_common_pb2.Lineage, _Mapping]] = ..., source_rows: _Optional[int] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutPromptsRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "prompts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    prompts: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Prompt]
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_sample_pb2.Prompt, _Mapping]]] = ...) -> None: ...

class PutPromptsResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_common_pb2.ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_common_pb2.ItemStatus, _Mapping]]] = ...) -> None: ...

class LeasePromptsRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "holder", "incarnation", "max_prompts", "wait_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    holder: str
    incarnation: str
    max_prompts: int
    wait_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., holder: _Optional[str] = ..., incarnation: _Optional[str] = ..., max_prompts: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class PromptLease(_message.Message):
    __slots__ = ("lease_id", "attempt", "prompt", "ttl_seconds", "minimum_version", "group_size", "purpose", "evaluation_id", "sampling", "partial")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    attempt: int
    prompt: _sample_pb2.Prompt
    ttl_seconds: float
    minimum_version: _common_pb2.PolicyVersion
    group_size: int
    purpose: LeasePurpose
    evaluation_id: str
    sampling: _sample_pb2.SamplingParams
    partial: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Rollout]
    def __init__(self, lease_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt: _Optional[_Union[_sample_pb2.Prompt, _Mapping]] = ..., ttl_seconds: _Optional[float] = ..., minimum_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., group_size: _Optional[int] = ..., purpose: _Optional[_Union[LeasePurpose, str]] = ..., evaluation_id: _Optional[str] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., partial: _Optional[_Iterable[_Union[_sample_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class LeasePromptsResponse(_message.Message):
    __slots__ = ("outcome", "leases")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    outcome: LeaseOutcome
    leases: _containers.RepeatedCompositeFieldContainer[PromptLease]
    def __init__(self, outcome: _Optional[_Union[LeaseOutcome, str]] = ..., leases: _Optional[_Iterable[_Union[PromptLease, _Mapping]]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("run_id", "lease_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("directives", "ttl_seconds")
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    directives: _containers.RepeatedScalarFieldContainer[LeaseDirective]
    ttl_seconds: float
    def __init__(self, directives: _Optional[_Iterable[_Union[LeaseDirective, str]]] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class CommitGroupRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "lease_id", "attempt", "group")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    lease_id: str
    attempt: int
    group: _sample_pb2.Group
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., attempt: _Optional[int] = ..., group: _Optional[_Union[_sample_pb2.Group, _Mapping]] = ...) -> None: ...

class CommitGroupResponse(_message.Message):
    __slots__ = ("outcome", "reason")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    outcome: CommitOutcome
    reason: str
    def __init__(self, outcome: _Optional[_Union[CommitOutcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "lease_id", "reason", "failed", "partial")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    lease_id: str
    reason: str
    failed: bool
    partial: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Rollout]
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., reason: _Optional[str] = ..., failed: bool = ..., partial: _Optional[_Iterable[_Union[_sample_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseBatchRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "holder", "incarnation", "wait_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    holder: str
    incarnation: str
    wait_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., holder: _Optional[str] = ..., incarnation: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class VersionTokens(_message.Message):
    __slots__ = ("version", "tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    tokens: int
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class SampleIndex(_message.Message):
    __slots__ = ("sample_id", "tokens", "trainable_tokens", "versions", "bytes", "routing_bytes")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTING_BYTES_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    tokens: int
    trainable_tokens: int
    versions: _containers.RepeatedCompositeFieldContainer[VersionTokens]
    bytes: int
    routing_bytes: int
    def __init__(self, sample_id: _Optional[str] = ..., tokens: _Optional[int] = ..., trainable_tokens: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[VersionTokens, _Mapping]]] = ..., bytes: _Optional[int] = ..., routing_bytes: _Optional[int] = ...) -> None: ...

class RolloutIndex(_message.Message):
    __slots__ = ("rollout_id", "reward", "rewards", "status", "reliable", "samples")
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RELIABLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    reward: float
    rewards: _containers.ScalarMap[str, float]
    status: _sample_pb2.RolloutStatus
    reliable: bool
    samples: _containers.RepeatedCompositeFieldContainer[SampleIndex]
    def __init__(self, rollout_id: _Optional[str] = ..., reward: _Optional[float] = ..., rewards: _Optional[_Mapping[str, float]] = ..., status: _Optional[_Union[_sample_pb2.RolloutStatus, str]] = ..., reliable: bool = ..., samples: _Optional[_Iterable[_Union[SampleIndex, _Mapping]]] = ...) -> None: ...

class GroupIndex(_message.Message):
    __slots__ = ("group_id", "prompt_id", "rollouts", "attempt")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_id: str
    rollouts: _containers.RepeatedCompositeFieldContainer[RolloutIndex]
    attempt: int
    def __init__(self, group_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., rollouts: _Optional[_Iterable[_Union[RolloutIndex, _Mapping]]] = ..., attempt: _Optional[int] = ...) -> None: ...

class LeaseBatchResponse(_message.Message):
    __slots__ = ("outcome", "lease_id", "batch_id", "ordinal", "ttl_seconds", "groups")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    outcome: LeaseOutcome
    lease_id: str
    batch_id: str
    ordinal: int
    ttl_seconds: float
    groups: _containers.RepeatedCompositeFieldContainer[GroupIndex]
    def __init__(self, outcome: _Optional[_Union[LeaseOutcome, str]] = ..., lease_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., groups: _Optional[_Iterable[_Union[GroupIndex, _Mapping]]] = ...) -> None: ...

class SampleSelection(_message.Message):
    __slots__ = ("sample_id", "routing_rows")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTING_ROWS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    routing_rows: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexRange]
    def __init__(self, sample_id: _Optional[str] = ..., routing_rows: _Optional[_Iterable[_Union[_common_pb2.IndexRange, _Mapping]]] = ...) -> None: ...

class FetchSamplesRequest(_message.Message):
    __slots__ = ("run_id", "samples", "fields", "routing_layers")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_LAYERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    samples: _containers.RepeatedCompositeFieldContainer[SampleSelection]
    fields: _containers.RepeatedScalarFieldContainer[SampleField]
    routing_layers: _common_pb2.IndexRange
    def __init__(self, run_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SampleSelection, _Mapping]]] = ..., fields: _Optional[_Iterable[_Union[SampleField, str]]] = ..., routing_layers: _Optional[_Union[_common_pb2.IndexRange, _Mapping]] = ...) -> None: ...

class FetchSamplesResponse(_message.Message):
    __slots__ = ("sample", "status")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    sample: _sample_pb2.Sample
    status: _common_pb2.ItemStatus
    def __init__(self, sample: _Optional[_Union[_sample_pb2.Sample, _Mapping]] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, _Mapping]] = ...) -> None: ...

class PutBlobRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "data", "checksum")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    data: bytes
    checksum: _common_pb2.Checksum
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., data: _Optional[bytes] = ..., checksum: _Optional[_Union[_common_pb2.Checksum, _Mapping]] = ...) -> None: ...

class PutBlobResponse(_message.Message):
    __slots__ = ("blob_id", "length")
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    blob_id: str
    length: int
    def __init__(self, blob_id: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class GetBlobRequest(_message.Message):
    __slots__ = ("run_id", "blob_id", "ranges")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    blob_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ByteRange]
    def __init__(self, run_id: _Optional[str] = ..., blob_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.ByteRange, _Mapping]]] = ...) -> None: ...

class GetBlobResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class AckBatchRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "lease_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    lease_id: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class AckBatchResponse(_message.Message):
    __slots__ = ("trained",)
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    trained: int
    def __init__(self, trained: _Optional[int] = ...) -> None: ...

class NackBatchRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "lease_id", "refused_samples", "reason")
    class RefusedSamplesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    lease_id: str
    refused_samples: _containers.ScalarMap[str, str]
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., refused_samples: _Optional[_Mapping[str, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class NackBatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishVersionRequest(_message.Message):
    __slots__ = ("request_id", "version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    version: _common_pb2.PolicyVersion
    def __init__(self, request_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class PublishVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportCheckpointRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "batch", "oldest_restorable")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_RESTORABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    batch: int
    oldest_restorable: int
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., batch: _Optional[int] = ..., oldest_restorable: _Optional[int] = ...) -> None: ...

class ReportCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RewindRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "batch", "lineage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    batch: int
    lineage: _common_pb2.Lineage
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., batch: _Optional[int] = ..., lineage: _Optional[_Union[_common_pb2.Lineage, _Mapping]] = ...) -> None: ...

class RewindResponse(_message.Message):
    __slots__ = ("batches_restored", "groups_expired")
    BATCHES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    batches_restored: int
    groups_expired: int
    def __init__(self, batches_restored: _Optional[int] = ..., groups_expired: _Optional[int] = ...) -> None: ...

class StartEvaluationRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "set", "version", "sampling", "rollouts_per_prompt", "deadline_seconds", "max_prompts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    set: str
    version: _common_pb2.PolicyVersion
    sampling: _sample_pb2.SamplingParams
    rollouts_per_prompt: int
    deadline_seconds: float
    max_prompts: int
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., set: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., rollouts_per_prompt: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., max_prompts: _Optional[int] = ...) -> None: ...

class StartEvaluationResponse(_message.Message):
    __slots__ = ("evaluation_id", "prompts")
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    evaluation_id: str
    prompts: int
    def __init__(self, evaluation_id: _Optional[str] = ..., prompts: _Optional[int] = ...) -> None: ...

class GetEvaluationResultRequest(_message.Message):
    __slots__ = ("run_id", "evaluation_id", "wait_seconds")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    evaluation_id: str
    wait_seconds: float
    def __init__(self, run_id: _Optional[str] = ..., evaluation_id: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class GetEvaluationResultResponse(_message.Message):
    __slots__ = ("done", "prompts", "completed_prompts", "rollouts", "scored_rollouts", "failed_rollouts", "mean_reward", "pass_at_k", "k", "mean_rewards", "mean_response_tokens", "truncated_share", "versions")
    class MeanRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    SCORED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_K_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    MEAN_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_SHARE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    prompts: int
    completed_prompts: int
    rollouts: int
    scored_rollouts: int
    failed_rollouts: int
    mean_reward: float
    pass_at_k: float
    k: int
    mean_rewards: _containers.ScalarMap[str, float]
    mean_response_tokens: float
    truncated_share: float
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.PolicyVersion]
    def __init__(self, done: bool = ..., prompts: _Optional[int] = ..., completed_prompts: _Optional[int] = ..., rollouts: _Optional[int] = ..., scored_rollouts: _Optional[int] = ..., failed_rollouts: _Optional[int] = ..., mean_reward: _Optional[float] = ..., pass_at_k: _Optional[float] = ..., k: _Optional[int] = ..., mean_rewards: _Optional[_Mapping[str, float]] = ..., mean_response_tokens: _Optional[float] = ..., truncated_share: _Optional[float] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.PolicyVersion, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("prompts_leased", "groups_ready", "groups_batch_leased", "batches_trained", "version", "capacity", "groups_committed_total", "groups_filtered_total", "groups_expired_total", "prompts_dropped_total", "leases_lapsed_total", "prompts_read_total", "rollouts_failed_total", "payload_bytes", "evaluations_open", "closed", "prompts_requeued")
    class GroupsFilteredTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RolloutsFailedTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPTS_LEASED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_READY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_BATCH_LEASED_FIELD_NUMBER: _ClassVar[int]
    BATCHES_TRAINED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_COMMITTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FILTERED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_EXPIRED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_DROPPED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEASES_LAPSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_READ_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_REQUEUED_FIELD_NUMBER: _ClassVar[int]
    prompts_leased: int
    groups_ready: int
    groups_batch_leased: int
    batches_trained: int
    version: int
    capacity: int
    groups_committed_total: int
    groups_filtered_total: _containers.ScalarMap[str, int]
    groups_expired_total: int
    prompts_dropped_total: int
    leases_lapsed_total: int
    prompts_read_total: int
    rollouts_failed_total: _containers.ScalarMap[str, int]
    payload_bytes: int
    evaluations_open: int
    closed: bool
    prompts_requeued: int
    def __init__(self, prompts_leased: _Optional[int] = ..., groups_ready: _Optional[int] = ..., groups_batch_leased: _Optional[int] = ..., batches_trained: _Optional[int] = ..., version: _Optional[int] = ..., capacity: _Optional[int] = ..., groups_committed_total: _Optional[int] = ..., groups_filtered_total: _Optional[_Mapping[str, int]] = ..., groups_expired_total: _Optional[int] = ..., prompts_dropped_total: _Optional[int] = ..., leases_lapsed_total: _Optional[int] = ..., prompts_read_total: _Optional[int] = ..., rollouts_failed_total: _Optional[_Mapping[str, int]] = ..., payload_bytes: _Optional[int] = ..., evaluations_open: _Optional[int] = ..., closed: bool = ..., prompts_requeued: _Optional[int] = ...) -> None: ...
