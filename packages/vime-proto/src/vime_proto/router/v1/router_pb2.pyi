from vime_proto.common.v1 import common_pb2 as _common_pb2
from vime_proto.rollout.v1 import rollout_pb2 as _rollout_pb2
from vime_proto.sample.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_HEALTH_UNSPECIFIED: _ClassVar[EngineHealth]
    ENGINE_HEALTH_HEALTHY: _ClassVar[EngineHealth]
    ENGINE_HEALTH_UNHEALTHY: _ClassVar[EngineHealth]
    ENGINE_HEALTH_DRAINING: _ClassVar[EngineHealth]
    ENGINE_HEALTH_INELIGIBLE: _ClassVar[EngineHealth]
ENGINE_HEALTH_UNSPECIFIED: EngineHealth
ENGINE_HEALTH_HEALTHY: EngineHealth
ENGINE_HEALTH_UNHEALTHY: EngineHealth
ENGINE_HEALTH_DRAINING: EngineHealth
ENGINE_HEALTH_INELIGIBLE: EngineHealth

class EngineEntry(_message.Message):
    __slots__ = ("engine_id", "address", "health", "status", "outstanding_requests", "outstanding_tokens", "requests_total", "failures_total", "lease_seconds", "reason", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILURES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    address: str
    health: EngineHealth
    status: _rollout_pb2.EngineStatus
    outstanding_requests: int
    outstanding_tokens: int
    requests_total: int
    failures_total: int
    lease_seconds: float
    reason: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ..., health: _Optional[_Union[EngineHealth, str]] = ..., status: _Optional[_Union[_rollout_pb2.EngineStatus, _Mapping]] = ..., outstanding_requests: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., requests_total: _Optional[int] = ..., failures_total: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RegisterEngineRequest(_message.Message):
    __slots__ = ("request_id", "engine_id", "address", "lease_seconds", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine_id: str
    address: str
    lease_seconds: float
    labels: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., address: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RegisterEngineResponse(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: EngineEntry
    def __init__(self, engine: _Optional[_Union[EngineEntry, _Mapping]] = ...) -> None: ...

class DeregisterEngineRequest(_message.Message):
    __slots__ = ("request_id", "engine_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine_id: str
    def __init__(self, request_id: _Optional[str] = ..., engine_id: _Optional[str] = ...) -> None: ...

class DeregisterEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("request_id", "engine_id", "then_remove", "undo")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    THEN_REMOVE_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine_id: str
    then_remove: bool
    undo: bool
    def __init__(self, request_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., then_remove: bool = ..., undo: bool = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: EngineEntry
    def __init__(self, engine: _Optional[_Union[EngineEntry, _Mapping]] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("labels", "refresh")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REFRESH_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    refresh: bool
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., refresh: bool = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "policy", "minimum_version", "queued")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_VERSION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineEntry]
    policy: str
    minimum_version: _common_pb2.PolicyVersion
    queued: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineEntry, _Mapping]]] = ..., policy: _Optional[str] = ..., minimum_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., queued: _Optional[int] = ...) -> None: ...

class SetMinimumVersionRequest(_message.Message):
    __slots__ = ("request_id", "version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    version: _common_pb2.PolicyVersion
    def __init__(self, request_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class SetMinimumVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchSessionRequest(_message.Message):
    __slots__ = ("session_id", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    close: bool
    def __init__(self, session_id: _Optional[str] = ..., close: bool = ...) -> None: ...

class FetchSessionResponse(_message.Message):
    __slots__ = ("samples", "requests")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Sample]
    requests: int
    def __init__(self, samples: _Optional[_Iterable[_Union[_sample_pb2.Sample, _Mapping]]] = ..., requests: _Optional[int] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("request_id", "session_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
