from flashsplit.shard.v1 import failure_pb2 as _failure_pb2
from flashsplit.shard.v1 import model_pb2 as _model_pb2
from flashsplit.shard.v1 import shared_memory_pb2 as _shared_memory_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotOwner(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_OWNER_UNSPECIFIED: _ClassVar[SnapshotOwner]
    SNAPSHOT_OWNER_STAGE: _ClassVar[SnapshotOwner]
    SNAPSHOT_OWNER_DRAFT: _ClassVar[SnapshotOwner]
SNAPSHOT_OWNER_UNSPECIFIED: SnapshotOwner
SNAPSHOT_OWNER_STAGE: SnapshotOwner
SNAPSHOT_OWNER_DRAFT: SnapshotOwner

class SnapshotSave(_message.Message):
    __slots__ = ("snapshot_id", "length", "parent_id")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    length: int
    parent_id: str
    def __init__(self, snapshot_id: _Optional[str] = ..., length: _Optional[int] = ..., parent_id: _Optional[str] = ...) -> None: ...

class SnapshotRestore(_message.Message):
    __slots__ = ("snapshot_id", "length", "token_ids")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, snapshot_id: _Optional[str] = ..., length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("location", "size_bytes", "elapsed_ns", "evicted_ids", "refusal")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_NS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IDS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    location: _failure_pb2.Location
    size_bytes: int
    elapsed_ns: int
    evicted_ids: _containers.RepeatedScalarFieldContainer[str]
    refusal: str
    def __init__(self, location: _Optional[_Union[_failure_pb2.Location, _Mapping]] = ..., size_bytes: _Optional[int] = ..., elapsed_ns: _Optional[int] = ..., evicted_ids: _Optional[_Iterable[str]] = ..., refusal: _Optional[str] = ...) -> None: ...

class SnapshotSaved(_message.Message):
    __slots__ = ("snapshot_id", "length", "parts")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    length: int
    parts: _containers.RepeatedCompositeFieldContainer[SnapshotPart]
    def __init__(self, snapshot_id: _Optional[str] = ..., length: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[SnapshotPart, _Mapping]]] = ...) -> None: ...

class SnapshotRestored(_message.Message):
    __slots__ = ("snapshot_id", "length", "parts")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    length: int
    parts: _containers.RepeatedCompositeFieldContainer[SnapshotPart]
    def __init__(self, snapshot_id: _Optional[str] = ..., length: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[SnapshotPart, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("snapshot_id", "owner", "fingerprint", "layers", "first_token", "token_count", "parent_id", "tensors")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    owner: SnapshotOwner
    fingerprint: str
    layers: _model_pb2.LayerRange
    first_token: int
    token_count: int
    parent_id: str
    tensors: _containers.RepeatedCompositeFieldContainer[SnapshotTensor]
    def __init__(self, snapshot_id: _Optional[str] = ..., owner: _Optional[_Union[SnapshotOwner, str]] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[_Union[_model_pb2.LayerRange, _Mapping]] = ..., first_token: _Optional[int] = ..., token_count: _Optional[int] = ..., parent_id: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[SnapshotTensor, _Mapping]]] = ...) -> None: ...

class PrefixSnapshotChunk(_message.Message):
    __slots__ = ("offset", "data", "shared")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    shared: _shared_memory_pb2.SharedPayload
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., shared: _Optional[_Union[_shared_memory_pb2.SharedPayload, _Mapping]] = ...) -> None: ...

class PrefixSnapshotTrailer(_message.Message):
    __slots__ = ("total_bytes", "tensor_sha256")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_SHA256_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    tensor_sha256: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, total_bytes: _Optional[int] = ..., tensor_sha256: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixSnapshotExportRequest(_message.Message):
    __slots__ = ("snapshot_id", "owner", "first_token", "parent_id", "link_id", "transfer_id", "holder_id")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    owner: SnapshotOwner
    first_token: int
    parent_id: str
    link_id: int
    transfer_id: int
    holder_id: str
    def __init__(self, snapshot_id: _Optional[str] = ..., owner: _Optional[_Union[SnapshotOwner, str]] = ..., first_token: _Optional[int] = ..., parent_id: _Optional[str] = ..., link_id: _Optional[int] = ..., transfer_id: _Optional[int] = ..., holder_id: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("header", "chunk", "trailer", "holder_id")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    header: PrefixSnapshotHeader
    chunk: PrefixSnapshotChunk
    trailer: PrefixSnapshotTrailer
    holder_id: str
    def __init__(self, header: _Optional[_Union[PrefixSnapshotHeader, _Mapping]] = ..., chunk: _Optional[_Union[PrefixSnapshotChunk, _Mapping]] = ..., trailer: _Optional[_Union[PrefixSnapshotTrailer, _Mapping]] = ..., holder_id: _Optional[str] = ...) -> None: ...

class PrefixSnapshotWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefixSnapshotImported(_message.Message):
    __slots__ = ("stored_bytes", "evicted_ids")
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IDS_FIELD_NUMBER: _ClassVar[int]
    stored_bytes: int
    evicted_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stored_bytes: _Optional[int] = ..., evicted_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefixSnapshotImportResponse(_message.Message):
    __slots__ = ("wanted", "imported")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    wanted: PrefixSnapshotWanted
    imported: PrefixSnapshotImported
    def __init__(self, wanted: _Optional[_Union[PrefixSnapshotWanted, _Mapping]] = ..., imported: _Optional[_Union[PrefixSnapshotImported, _Mapping]] = ...) -> None: ...

class SnapshotListRequest(_message.Message):
    __slots__ = ("holder_id",)
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    def __init__(self, holder_id: _Optional[str] = ...) -> None: ...

class SnapshotListResponse(_message.Message):
    __slots__ = ("snapshot_id", "owner", "token_count", "parent_id")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    owner: SnapshotOwner
    token_count: int
    parent_id: str
    def __init__(self, snapshot_id: _Optional[str] = ..., owner: _Optional[_Union[SnapshotOwner, str]] = ..., token_count: _Optional[int] = ..., parent_id: _Optional[str] = ...) -> None: ...

class SnapshotFreeRequest(_message.Message):
    __slots__ = ("snapshot_ids", "holder_id")
    SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_ids: _containers.RepeatedScalarFieldContainer[str]
    holder_id: str
    def __init__(self, snapshot_ids: _Optional[_Iterable[str]] = ..., holder_id: _Optional[str] = ...) -> None: ...

class SnapshotFreeResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...
