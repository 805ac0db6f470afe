from flashsplit.shard.v1 import model_pb2 as _model_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotSave(_message.Message):
    __slots__ = ("snapshot_id", "length")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    length: int
    def __init__(self, snapshot_id: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class SnapshotRestore(_message.Message):
    __slots__ = ("snapshot_id", "length")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    length: int
    def __init__(self, snapshot_id: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class SnapshotFree(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class SnapshotTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class PrefixSnapshotHeader(_message.Message):
    __slots__ = ("fingerprint", "layers", "token_count", "tensors")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    layers: _model_pb2.LayerRange
    token_count: int
    tensors: _containers.RepeatedCompositeFieldContainer[SnapshotTensor]
    def __init__(self, fingerprint: _Optional[str] = ..., layers: _Optional[_Union[_model_pb2.LayerRange, _Mapping]] = ..., token_count: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[SnapshotTensor, _Mapping]]] = ...) -> None: ...

class PrefixSnapshotChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PrefixSnapshotTrailer(_message.Message):
    __slots__ = ("total_bytes", "sha256")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    sha256: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class PrefixSnapshotExportRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class PrefixSnapshotExportResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: PrefixSnapshotHeader
    chunk: PrefixSnapshotChunk
    trailer: PrefixSnapshotTrailer
    def __init__(self, header: _Optional[_Union[PrefixSnapshotHeader, _Mapping]] = ..., chunk: _Optional[_Union[PrefixSnapshotChunk, _Mapping]] = ..., trailer: _Optional[_Union[PrefixSnapshotTrailer, _Mapping]] = ...) -> None: ...

class PrefixSnapshotImportRequest(_message.Message):
    __slots__ = ("snapshot_id", "header", "chunk", "trailer")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    header: PrefixSnapshotHeader
    chunk: PrefixSnapshotChunk
    trailer: PrefixSnapshotTrailer
    def __init__(self, snapshot_id: _Optional[str] = ..., header: _Optional[_Union[PrefixSnapshotHeader, _Mapping]] = ..., chunk: _Optional[_Union[PrefixSnapshotChunk, _Mapping]] = ..., trailer: _Optional[_Union[PrefixSnapshotTrailer, _Mapping]] = ...) -> None: ...

class PrefixSnapshotImportResponse(_message.Message):
    __slots__ = ("stored_bytes",)
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    stored_bytes: int
    def __init__(self, stored_bytes: _Optional[int] = ...) -> None: ...
