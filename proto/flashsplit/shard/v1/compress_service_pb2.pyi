from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CompressRequest(_message.Message):
    __slots__ = ("request_id", "fingerprint", "token_ids", "keep_ratio", "holder_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_ratio: float
    holder_id: str
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., keep_ratio: _Optional[float] = ..., holder_id: _Optional[str] = ...) -> None: ...

class CompressProgress(_message.Message):
    __slots__ = ("layers", "num_layers")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    num_layers: int
    def __init__(self, layers: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Compressed(_message.Message):
    __slots__ = ("kept", "forward_ns")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedCompositeFieldContainer[TokenRange]
    forward_ns: int
    def __init__(self, kept: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., forward_ns: _Optional[int] = ...) -> None: ...

class CompressResponse(_message.Message):
    __slots__ = ("progress", "compressed")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    progress: CompressProgress
    compressed: Compressed
    def __init__(self, progress: _Optional[_Union[CompressProgress, _Mapping]] = ..., compressed: _Optional[_Union[Compressed, _Mapping]] = ...) -> None: ...
