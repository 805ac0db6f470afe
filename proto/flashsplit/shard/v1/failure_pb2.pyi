from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_LINK_BROKEN: _ClassVar[FailureReason]
    FAILURE_REASON_STAGE_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_DRAFT_LOST: _ClassVar[FailureReason]
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_LINK_BROKEN: FailureReason
FAILURE_REASON_STAGE_FAILED: FailureReason
FAILURE_REASON_DRAFT_LOST: FailureReason

class Location(_message.Message):
    __slots__ = ("stage", "host", "device", "address")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    host: str
    device: str
    address: str
    def __init__(self, stage: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "message", "location", "code", "cause")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    message: str
    location: Location
    code: str
    cause: str
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., code: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...
