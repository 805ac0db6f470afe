from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MeasureRequest(_message.Message):
    __slots__ = ("model_path", "dtype", "resident_bytes", "stages", "holder_id")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    dtype: _tensor_pb2.Dtype
    resident_bytes: int
    stages: int
    holder_id: str
    def __init__(self, model_path: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., resident_bytes: _Optional[int] = ..., stages: _Optional[int] = ..., holder_id: _Optional[str] = ...) -> None: ...

class LayerCost(_message.Message):
    __slots__ = ("kind", "nanoseconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    nanoseconds: int
    def __init__(self, kind: _Optional[str] = ..., nanoseconds: _Optional[int] = ...) -> None: ...

class DeviceSpeed(_message.Message):
    __slots__ = ("name", "total_bytes", "free_bytes", "read_bytes_per_s", "matmul_flops_per_s", "layers", "step_nanoseconds", "choose_nanoseconds", "copy_bytes_per_s", "limited", "host")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MATMUL_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STEP_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    CHOOSE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMITED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_bytes: int
    free_bytes: int
    read_bytes_per_s: float
    matmul_flops_per_s: float
    layers: _containers.RepeatedCompositeFieldContainer[LayerCost]
    step_nanoseconds: int
    choose_nanoseconds: int
    copy_bytes_per_s: float
    limited: bool
    host: HostSpeed
    def __init__(self, name: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., matmul_flops_per_s: _Optional[float] = ..., layers: _Optional[_Iterable[_Union[LayerCost, _Mapping]]] = ..., step_nanoseconds: _Optional[int] = ..., choose_nanoseconds: _Optional[int] = ..., copy_bytes_per_s: _Optional[float] = ..., limited: _Optional[bool] = ..., host: _Optional[_Union[HostSpeed, _Mapping]] = ...) -> None: ...

class HostSpeed(_message.Message):
    __slots__ = ("total_bytes", "free_bytes", "read_bytes_per_s", "layers", "copy_bytes_per_s")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    free_bytes: int
    read_bytes_per_s: float
    layers: _containers.RepeatedCompositeFieldContainer[LayerCost]
    copy_bytes_per_s: float
    def __init__(self, total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., layers: _Optional[_Iterable[_Union[LayerCost, _Mapping]]] = ..., copy_bytes_per_s: _Optional[float] = ...) -> None: ...

class MeasureResponse(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceSpeed]
    def __init__(self, devices: _Optional[_Iterable[_Union[DeviceSpeed, _Mapping]]] = ...) -> None: ...

class EchoRequest(_message.Message):
    __slots__ = ("payload", "holder_id")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    holder_id: str
    def __init__(self, payload: _Optional[bytes] = ..., holder_id: _Optional[str] = ...) -> None: ...

class EchoResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...
