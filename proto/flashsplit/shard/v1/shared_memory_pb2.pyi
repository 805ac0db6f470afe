from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SharedSegment(_message.Message):
    __slots__ = ("process_id", "descriptor", "size_bytes", "nonce")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    descriptor: int
    size_bytes: int
    nonce: bytes
    def __init__(self, process_id: _Optional[int] = ..., descriptor: _Optional[int] = ..., size_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class SharedPayload(_message.Message):
    __slots__ = ("link_id", "sequence", "offset", "size_bytes")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    link_id: int
    sequence: int
    offset: int
    size_bytes: int
    def __init__(self, link_id: _Optional[int] = ..., sequence: _Optional[int] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class SharedConsumed(_message.Message):
    __slots__ = ("sequences", "transfer_ids")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., transfer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ShareMemoryRequest(_message.Message):
    __slots__ = ("segment", "consumed")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    segment: SharedSegment
    consumed: SharedConsumed
    def __init__(self, segment: _Optional[_Union[SharedSegment, _Mapping]] = ..., consumed: _Optional[_Union[SharedConsumed, _Mapping]] = ...) -> None: ...

class ShareMemoryResponse(_message.Message):
    __slots__ = ("opened", "consumed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    opened: SharedOpened
    consumed: SharedConsumed
    def __init__(self, opened: _Optional[_Union[SharedOpened, _Mapping]] = ..., consumed: _Optional[_Union[SharedConsumed, _Mapping]] = ...) -> None: ...

class SharedOpened(_message.Message):
    __slots__ = ("link_id", "segment", "socket", "step_socket")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    STEP_SOCKET_FIELD_NUMBER: _ClassVar[int]
    link_id: int
    segment: SharedSegment
    socket: str
    step_socket: str
    def __init__(self, link_id: _Optional[int] = ..., segment: _Optional[_Union[SharedSegment, _Mapping]] = ..., socket: _Optional[str] = ..., step_socket: _Optional[str] = ...) -> None: ...

class FrameLane(_message.Message):
    __slots__ = ("link_id", "stream_id", "steps", "batches", "tokens")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    link_id: int
    stream_id: int
    steps: bool
    batches: bool
    tokens: bool
    def __init__(self, link_id: _Optional[int] = ..., stream_id: _Optional[int] = ..., steps: _Optional[bool] = ..., batches: _Optional[bool] = ..., tokens: _Optional[bool] = ...) -> None: ...
