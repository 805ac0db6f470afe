from flashsplit.shard.v1 import shared_memory_pb2 as _shared_memory_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftOpen(_message.Message):
    __slots__ = ("request_id", "fingerprint", "max_length", "traceparent", "lane", "holder_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: str
    max_length: int
    traceparent: str
    lane: _shared_memory_pb2.FrameLane
    holder_id: str
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_length: _Optional[int] = ..., traceparent: _Optional[str] = ..., lane: _Optional[_Union[_shared_memory_pb2.FrameLane, _Mapping]] = ..., holder_id: _Optional[str] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("host", "device", "lane")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    host: str
    device: str
    lane: bool
    def __init__(self, host: _Optional[str] = ..., device: _Optional[str] = ..., lane: _Optional[bool] = ...) -> None: ...

class Embed(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _tensor_pb2.Tensor
    def __init__(self, rows: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Project(_message.Message):
    __slots__ = ("hidden",)
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    hidden: _tensor_pb2.Tensor
    def __init__(self, hidden: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("step", "position", "token_id", "tokens", "embed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    step: int
    position: int
    token_id: int
    tokens: int
    embed: Embed
    def __init__(self, step: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., tokens: _Optional[int] = ..., embed: _Optional[_Union[Embed, _Mapping]] = ...) -> None: ...

class ProposedTokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Proposed(_message.Message):
    __slots__ = ("step", "tokens", "project")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: ProposedTokens
    project: Project
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Union[ProposedTokens, _Mapping]] = ..., project: _Optional[_Union[Project, _Mapping]] = ...) -> None: ...
