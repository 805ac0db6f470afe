from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_TARGET: _ClassVar[Role]
    ROLE_DRAFT: _ClassVar[Role]
    ROLE_COMPRESS: _ClassVar[Role]

class FeatureTransport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_TRANSPORT_UNSPECIFIED: _ClassVar[FeatureTransport]
    FEATURE_TRANSPORT_SUM: _ClassVar[FeatureTransport]
    FEATURE_TRANSPORT_SLICES: _ClassVar[FeatureTransport]

class HeadPlace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEAD_PLACE_UNSPECIFIED: _ClassVar[HeadPlace]
    HEAD_PLACE_SHARED: _ClassVar[HeadPlace]
    HEAD_PLACE_LOADED: _ClassVar[HeadPlace]
    HEAD_PLACE_PROJECTED: _ClassVar[HeadPlace]

class StepEngine(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_ENGINE_UNSPECIFIED: _ClassVar[StepEngine]
    STEP_ENGINE_TORCH: _ClassVar[StepEngine]
    STEP_ENGINE_KERNELS: _ClassVar[StepEngine]
    STEP_ENGINE_GRAPHS: _ClassVar[StepEngine]

class QuantizationType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTIZATION_TYPE_UNSPECIFIED: _ClassVar[QuantizationType]
    QUANTIZATION_TYPE_INT8: _ClassVar[QuantizationType]
    QUANTIZATION_TYPE_INT4: _ClassVar[QuantizationType]
    QUANTIZATION_TYPE_FP8: _ClassVar[QuantizationType]
ROLE_UNSPECIFIED: Role
ROLE_TARGET: Role
ROLE_DRAFT: Role
ROLE_COMPRESS: Role
FEATURE_TRANSPORT_UNSPECIFIED: FeatureTransport
FEATURE_TRANSPORT_SUM: FeatureTransport
FEATURE_TRANSPORT_SLICES: FeatureTransport
HEAD_PLACE_UNSPECIFIED: HeadPlace
HEAD_PLACE_SHARED: HeadPlace
HEAD_PLACE_LOADED: HeadPlace
HEAD_PLACE_PROJECTED: HeadPlace
STEP_ENGINE_UNSPECIFIED: StepEngine
STEP_ENGINE_TORCH: StepEngine
STEP_ENGINE_KERNELS: StepEngine
STEP_ENGINE_GRAPHS: StepEngine
QUANTIZATION_TYPE_UNSPECIFIED: QuantizationType
QUANTIZATION_TYPE_INT8: QuantizationType
QUANTIZATION_TYPE_INT4: QuantizationType
QUANTIZATION_TYPE_FP8: QuantizationType

class LayerRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Quantization(_message.Message):
    __slots__ = ("type", "ends")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    type: QuantizationType
    ends: bool
    def __init__(self, type: _Optional[_Union[QuantizationType, str]] = ..., ends: _Optional[bool] = ...) -> None: ...

class TargetDescription(_message.Message):
    __slots__ = ("fingerprint", "family", "layers", "num_layers", "hidden_size", "vocab_size", "max_position", "dtype", "capture_layers", "feature_transport", "weight_bytes", "state_cuttable", "step_engine", "kv_dtype", "quantization", "rope_scaling", "session_tokens", "host_experts", "host_weight_bytes", "recurrent", "batch_row_counts", "mixture")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_CUTTABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_ENGINE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ROPE_SCALING_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HOST_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    family: str
    layers: LayerRange
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    dtype: _tensor_pb2.Dtype
    capture_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_transport: FeatureTransport
    weight_bytes: int
    state_cuttable: bool
    step_engine: StepEngine
    kv_dtype: _tensor_pb2.Dtype
    quantization: Quantization
    rope_scaling: str
    session_tokens: int
    host_experts: float
    host_weight_bytes: int
    recurrent: bool
    batch_row_counts: _containers.RepeatedScalarFieldContainer[int]
    mixture: bool
    def __init__(self, fingerprint: _Optional[str] = ..., family: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_position: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., capture_layers: _Optional[_Iterable[int]] = ..., feature_transport: _Optional[_Union[FeatureTransport, str]] = ..., weight_bytes: _Optional[int] = ..., state_cuttable: _Optional[bool] = ..., step_engine: _Optional[_Union[StepEngine, str]] = ..., kv_dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., quantization: _Optional[_Union[Quantization, _Mapping]] = ..., rope_scaling: _Optional[str] = ..., session_tokens: _Optional[int] = ..., host_experts: _Optional[float] = ..., host_weight_bytes: _Optional[int] = ..., recurrent: _Optional[bool] = ..., batch_row_counts: _Optional[_Iterable[int]] = ..., mixture: _Optional[bool] = ...) -> None: ...

class DraftDescription(_message.Message):
    __slots__ = ("fingerprint", "block_size", "mask_token_id", "capture_layers", "hidden_size", "vocab_size", "num_target_layers", "head_place", "feature_transport", "max_position", "dtype", "weight_bytes", "state_cuttable", "step_engine", "quantization", "draft_vocab_size")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_PLACE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_CUTTABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_ENGINE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    block_size: int
    mask_token_id: int
    capture_layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    head_place: HeadPlace
    feature_transport: FeatureTransport
    max_position: int
    dtype: _tensor_pb2.Dtype
    weight_bytes: int
    state_cuttable: bool
    step_engine: StepEngine
    quantization: Quantization
    draft_vocab_size: int
    def __init__(self, fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., capture_layers: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_target_layers: _Optional[int] = ..., head_place: _Optional[_Union[HeadPlace, str]] = ..., feature_transport: _Optional[_Union[FeatureTransport, str]] = ..., max_position: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., weight_bytes: _Optional[int] = ..., state_cuttable: _Optional[bool] = ..., step_engine: _Optional[_Union[StepEngine, str]] = ..., quantization: _Optional[_Union[Quantization, _Mapping]] = ..., draft_vocab_size: _Optional[int] = ...) -> None: ...

class DrafterDescription(_message.Message):
    __slots__ = ("fingerprint", "vocab_size", "num_layers", "max_position", "dtype", "weight_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    vocab_size: int
    num_layers: int
    max_position: int
    dtype: _tensor_pb2.Dtype
    weight_bytes: int
    def __init__(self, fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_position: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class DeviceDescription(_message.Message):
    __slots__ = ("name", "product", "total_bytes", "free_bytes", "pool_bytes", "pool_used_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    product: str
    total_bytes: int
    free_bytes: int
    pool_bytes: int
    pool_used_bytes: int
    def __init__(self, name: _Optional[str] = ..., product: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., pool_used_bytes: _Optional[int] = ...) -> None: ...

class BatchCounts(_message.Message):
    __slots__ = ("steps", "rows", "sessions", "steps_by_rows")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_ROWS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rows: int
    sessions: int
    steps_by_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., rows: _Optional[int] = ..., sessions: _Optional[int] = ..., steps_by_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "host", "devices", "roles", "flashsplit_version", "torch_version", "python_version", "target", "draft", "open_sessions", "process_id", "max_tensor_bytes", "snapshot_bytes", "snapshot_budget_bytes", "drafter", "session_bytes", "batches", "busy_ns", "counted_ns")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    FLASHSPLIT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_NS_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    host: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceDescription]
    roles: _containers.RepeatedScalarFieldContainer[Role]
    flashsplit_version: str
    torch_version: str
    python_version: str
    target: TargetDescription
    draft: DraftDescription
    open_sessions: int
    process_id: int
    max_tensor_bytes: int
    snapshot_bytes: int
    snapshot_budget_bytes: int
    drafter: DrafterDescription
    session_bytes: int
    batches: BatchCounts
    busy_ns: int
    counted_ns: int
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., host: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceDescription, _Mapping]]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., flashsplit_version: _Optional[str] = ..., torch_version: _Optional[str] = ..., python_version: _Optional[str] = ..., target: _Optional[_Union[TargetDescription, _Mapping]] = ..., draft: _Optional[_Union[DraftDescription, _Mapping]] = ..., open_sessions: _Optional[int] = ..., process_id: _Optional[int] = ..., max_tensor_bytes: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., snapshot_budget_bytes: _Optional[int] = ..., drafter: _Optional[_Union[DrafterDescription, _Mapping]] = ..., session_bytes: _Optional[int] = ..., batches: _Optional[_Union[BatchCounts, _Mapping]] = ..., busy_ns: _Optional[int] = ..., counted_ns: _Optional[int] = ...) -> None: ...
