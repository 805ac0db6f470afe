from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(_message.Message):
    __slots__ = ("name", "aliases", "context_length", "created")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    context_length: int
    created: int
    def __init__(self, name: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., context_length: _Optional[int] = ..., created: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("address", "host", "device", "first_layer", "last_layer", "weight_bytes")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    address: str
    host: str
    device: str
    first_layer: int
    last_layer: int
    weight_bytes: int
    def __init__(self, address: _Optional[str] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("address", "host", "device", "block_size", "weight_bytes")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    address: str
    host: str
    device: str
    block_size: int
    weight_bytes: int
    def __init__(self, address: _Optional[str] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "model", "stages", "draft", "ready", "uptime_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: Model
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    draft: Draft
    ready: bool
    uptime_seconds: float
    def __init__(self, version: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., ready: _Optional[bool] = ..., uptime_seconds: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "max_running", "max_waiting", "draining")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    max_running: int
    max_waiting: int
    draining: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., max_running: _Optional[int] = ..., max_waiting: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
