from flashsplit.shard.v1 import measure_pb2 as _measure_pb2
from flashsplit.shard.v1 import model_pb2 as _model_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: _model_pb2.WorkerDescription
    def __init__(self, worker: _Optional[_Union[_model_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...

class FeatureCapture(_message.Message):
    __slots__ = ("draft_path", "transport")
    DRAFT_PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    draft_path: str
    transport: _model_pb2.FeatureTransport
    def __init__(self, draft_path: _Optional[str] = ..., transport: _Optional[_Union[_model_pb2.FeatureTransport, str]] = ...) -> None: ...

class LoadTarget(_message.Message):
    __slots__ = ("model_path", "layers", "dtype", "capture", "kv_dtype", "quantization", "rope_scaling", "host_experts", "exact_rows")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ROPE_SCALING_FIELD_NUMBER: _ClassVar[int]
    HOST_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXACT_ROWS_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    layers: _model_pb2.LayerRange
    dtype: _tensor_pb2.Dtype
    capture: FeatureCapture
    kv_dtype: _tensor_pb2.Dtype
    quantization: _model_pb2.Quantization
    rope_scaling: str
    host_experts: float
    exact_rows: int
    def __init__(self, model_path: _Optional[str] = ..., layers: _Optional[_Union[_model_pb2.LayerRange, _Mapping]] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., capture: _Optional[_Union[FeatureCapture, _Mapping]] = ..., kv_dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., quantization: _Optional[_Union[_model_pb2.Quantization, _Mapping]] = ..., rope_scaling: _Optional[str] = ..., host_experts: _Optional[float] = ..., exact_rows: _Optional[int] = ...) -> None: ...

class LoadDraft(_message.Message):
    __slots__ = ("draft_path", "model_path", "head_place", "feature_transport", "dtype", "quantization", "target_quantization")
    DRAFT_PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    HEAD_PLACE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    draft_path: str
    model_path: str
    head_place: _model_pb2.HeadPlace
    feature_transport: _model_pb2.FeatureTransport
    dtype: _tensor_pb2.Dtype
    quantization: _model_pb2.Quantization
    target_quantization: _model_pb2.Quantization
    def __init__(self, draft_path: _Optional[str] = ..., model_path: _Optional[str] = ..., head_place: _Optional[_Union[_model_pb2.HeadPlace, str]] = ..., feature_transport: _Optional[_Union[_model_pb2.FeatureTransport, str]] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., quantization: _Optional[_Union[_model_pb2.Quantization, _Mapping]] = ..., target_quantization: _Optional[_Union[_model_pb2.Quantization, _Mapping]] = ...) -> None: ...

class LoadDrafter(_message.Message):
    __slots__ = ("drafter_path", "dtype")
    DRAFTER_PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    drafter_path: str
    dtype: _tensor_pb2.Dtype
    def __init__(self, drafter_path: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("holder_id", "name")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    name: str
    def __init__(self, holder_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("target", "draft", "drafter", "holder", "ends_sessions")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ENDS_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    target: LoadTarget
    draft: LoadDraft
    drafter: LoadDrafter
    holder: Holder
    ends_sessions: bool
    def __init__(self, target: _Optional[_Union[LoadTarget, _Mapping]] = ..., draft: _Optional[_Union[LoadDraft, _Mapping]] = ..., drafter: _Optional[_Union[LoadDrafter, _Mapping]] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., ends_sessions: _Optional[bool] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("loaded_bytes", "total_bytes")
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    loaded_bytes: int
    total_bytes: int
    def __init__(self, loaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("progress", "worker")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    progress: LoadProgress
    worker: _model_pb2.WorkerDescription
    def __init__(self, progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., worker: _Optional[_Union[_model_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...
