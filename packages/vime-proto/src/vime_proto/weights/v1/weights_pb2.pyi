from vime_proto.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorPiece(_message.Message):
    __slots__ = ("source_id", "bytes", "start", "shape")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    bytes: _common_pb2.ByteRange
    start: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source_id: _Optional[str] = ..., bytes: _Optional[_Union[_common_pb2.ByteRange, _Mapping]] = ..., start: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "pieces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _common_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedCompositeFieldContainer[TensorPiece]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[_Union[TensorPiece, _Mapping]]] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("index", "bytes", "checksum", "tensors")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    index: int
    bytes: _common_pb2.ByteRange
    checksum: _common_pb2.Checksum
    tensors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, index: _Optional[int] = ..., bytes: _Optional[_Union[_common_pb2.ByteRange, _Mapping]] = ..., checksum: _Optional[_Union[_common_pb2.Checksum, _Mapping]] = ..., tensors: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightSource(_message.Message):
    __slots__ = ("source_id", "endpoint", "chunks", "total_bytes")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    endpoint: str
    chunks: _containers.RepeatedCompositeFieldContainer[WeightChunk]
    total_bytes: int
    def __init__(self, source_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[WeightChunk, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("update_id", "version", "base_version", "model_digest", "sources", "tensors")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    version: _common_pb2.PolicyVersion
    base_version: _common_pb2.PolicyVersion
    model_digest: str
    sources: _containers.RepeatedCompositeFieldContainer[WeightSource]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, update_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., base_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., model_digest: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[WeightSource, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class FileTransport(_message.Message):
    __slots__ = ("root_uri",)
    ROOT_URI_FIELD_NUMBER: _ClassVar[int]
    root_uri: str
    def __init__(self, root_uri: _Optional[str] = ...) -> None: ...

class ShmTransport(_message.Message):
    __slots__ = ("root",)
    ROOT_FIELD_NUMBER: _ClassVar[int]
    root: str
    def __init__(self, root: _Optional[str] = ...) -> None: ...

class StreamTransport(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NcclTransport(_message.Message):
    __slots__ = ("store_address", "world_size", "rank_offsets", "group_id", "required_environment", "timeout_seconds")
    class RankOffsetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RequiredEnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    store_address: str
    world_size: int
    rank_offsets: _containers.ScalarMap[str, int]
    group_id: str
    required_environment: _containers.ScalarMap[str, str]
    timeout_seconds: float
    def __init__(self, store_address: _Optional[str] = ..., world_size: _Optional[int] = ..., rank_offsets: _Optional[_Mapping[str, int]] = ..., group_id: _Optional[str] = ..., required_environment: _Optional[_Mapping[str, str]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class CudaIpcTransport(_message.Message):
    __slots__ = ("handles",)
    class Handle(_message.Message):
        __slots__ = ("gpu_uuid", "memory_handle", "size", "offset", "event_handle")
        GPU_UUID_FIELD_NUMBER: _ClassVar[int]
        MEMORY_HANDLE_FIELD_NUMBER: _ClassVar[int]
        SIZE_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
        gpu_uuid: str
        memory_handle: bytes
        size: int
        offset: int
        event_handle: bytes
        def __init__(self, gpu_uuid: _Optional[str] = ..., memory_handle: _Optional[bytes] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ...) -> None: ...
    class HandlesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: CudaIpcTransport.Handle
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[CudaIpcTransport.Handle, _Mapping]] = ...) -> None: ...
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.MessageMap[str, CudaIpcTransport.Handle]
    def __init__(self, handles: _Optional[_Mapping[str, CudaIpcTransport.Handle]] = ...) -> None: ...

class TransportConfig(_message.Message):
    __slots__ = ("transport_id", "file", "shm", "stream", "nccl", "cuda_ipc")
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    transport_id: str
    file: FileTransport
    shm: ShmTransport
    stream: StreamTransport
    nccl: NcclTransport
    cuda_ipc: CudaIpcTransport
    def __init__(self, transport_id: _Optional[str] = ..., file: _Optional[_Union[FileTransport, _Mapping]] = ..., shm: _Optional[_Union[ShmTransport, _Mapping]] = ..., stream: _Optional[_Union[StreamTransport, _Mapping]] = ..., nccl: _Optional[_Union[NcclTransport, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcTransport, _Mapping]] = ...) -> None: ...

class SourceTotal(_message.Message):
    __slots__ = ("source_id", "chunks", "bytes", "checksum")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    chunks: int
    bytes: int
    checksum: _common_pb2.Checksum
    def __init__(self, source_id: _Optional[str] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[_Union[_common_pb2.Checksum, _Mapping]] = ...) -> None: ...

class GetLatestManifestRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetLatestManifestResponse(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ...) -> None: ...

class WatchManifestsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchManifestsResponse(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ...) -> None: ...

class FetchTensorsRequest(_message.Message):
    __slots__ = ("update_id", "source_id", "chunks")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    source_id: str
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, update_id: _Optional[str] = ..., source_id: _Optional[str] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchTensorsResponse(_message.Message):
    __slots__ = ("chunk", "offset", "data")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    offset: int
    data: bytes
    def __init__(self, chunk: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class AckAppliedRequest(_message.Message):
    __slots__ = ("request_id", "update_id", "engine_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    update_id: str
    engine_id: str
    def __init__(self, request_id: _Optional[str] = ..., update_id: _Optional[str] = ..., engine_id: _Optional[str] = ...) -> None: ...

class AckAppliedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
