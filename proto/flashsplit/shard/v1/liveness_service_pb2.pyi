from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HeartbeatsRequest(_message.Message):
    __slots__ = ("holder_id",)
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    def __init__(self, holder_id: _Optional[str] = ...) -> None: ...

class WorkerProcess(_message.Message):
    __slots__ = ("boot_id", "process_id", "started_ticks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_TICKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    process_id: int
    started_ticks: int
    def __init__(self, boot_id: _Optional[str] = ..., process_id: _Optional[int] = ..., started_ticks: _Optional[int] = ...) -> None: ...

class HeartbeatsResponse(_message.Message):
    __slots__ = ("process", "silence_ms", "trouble", "trouble_reason", "leaving")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    process: WorkerProcess
    silence_ms: int
    trouble: str
    trouble_reason: str
    leaving: bool
    def __init__(self, process: _Optional[_Union[WorkerProcess, _Mapping]] = ..., silence_ms: _Optional[int] = ..., trouble: _Optional[str] = ..., trouble_reason: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class CallerHeartbeatsRequest(_message.Message):
    __slots__ = ("takes_over",)
    TAKES_OVER_FIELD_NUMBER: _ClassVar[int]
    takes_over: bool
    def __init__(self, takes_over: _Optional[bool] = ...) -> None: ...

class CallerHeartbeatsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPeerRequest(_message.Message):
    __slots__ = ("address", "lost_after_ms")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOST_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    address: str
    lost_after_ms: int
    def __init__(self, address: _Optional[str] = ..., lost_after_ms: _Optional[int] = ...) -> None: ...

class WatchPeerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
