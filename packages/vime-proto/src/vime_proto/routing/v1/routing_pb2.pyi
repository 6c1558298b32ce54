from vime_proto.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_ZSTD: _ClassVar[Compression]
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_NONE: Compression
COMPRESSION_ZSTD: Compression

class VersionSpan(_message.Message):
    __slots__ = ("rows", "version")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    rows: _common_pb2.IndexRange
    version: _common_pb2.PolicyVersion
    def __init__(self, rows: _Optional[_Union[_common_pb2.IndexRange, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class TraceChunk(_message.Message):
    __slots__ = ("rows", "layers", "stored", "raw_length", "checksum", "compression")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    RAW_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    rows: _common_pb2.IndexRange
    layers: _common_pb2.IndexRange
    stored: _common_pb2.ByteRange
    raw_length: int
    checksum: _common_pb2.Checksum
    compression: Compression
    def __init__(self, rows: _Optional[_Union[_common_pb2.IndexRange, _Mapping]] = ..., layers: _Optional[_Union[_common_pb2.IndexRange, _Mapping]] = ..., stored: _Optional[_Union[_common_pb2.ByteRange, _Mapping]] = ..., raw_length: _Optional[int] = ..., checksum: _Optional[_Union[_common_pb2.Checksum, _Mapping]] = ..., compression: _Optional[_Union[Compression, str]] = ...) -> None: ...

class RoutingTraceHeader(_message.Message):
    __slots__ = ("experts", "top_k", "layer_ids", "rows", "dtype", "holes", "spans", "inexact", "chunks", "payload_length")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HOLES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    experts: int
    top_k: int
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    dtype: _common_pb2.Dtype
    holes: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexRange]
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    inexact: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexRange]
    chunks: _containers.RepeatedCompositeFieldContainer[TraceChunk]
    payload_length: int
    def __init__(self, experts: _Optional[int] = ..., top_k: _Optional[int] = ..., layer_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.Dtype, str]] = ..., holes: _Optional[_Iterable[_Union[_common_pb2.IndexRange, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., inexact: _Optional[_Iterable[_Union[_common_pb2.IndexRange, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[TraceChunk, _Mapping]]] = ..., payload_length: _Optional[int] = ...) -> None: ...

class RoutingTrace(_message.Message):
    __slots__ = ("header", "inline", "blob_id", "uri")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    header: RoutingTraceHeader
    inline: bytes
    blob_id: str
    uri: str
    def __init__(self, header: _Optional[_Union[RoutingTraceHeader, _Mapping]] = ..., inline: _Optional[bytes] = ..., blob_id: _Optional[str] = ..., uri: _Optional[str] = ...) -> None: ...
