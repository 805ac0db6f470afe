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

class StepKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_KIND_UNSPECIFIED: _ClassVar[StepKind]
    STEP_KIND_PREFILL: _ClassVar[StepKind]
    STEP_KIND_DECODE: _ClassVar[StepKind]
    STEP_KIND_VERIFY: _ClassVar[StepKind]
    STEP_KIND_RESUME: _ClassVar[StepKind]
STEP_KIND_UNSPECIFIED: StepKind
STEP_KIND_PREFILL: StepKind
STEP_KIND_DECODE: StepKind
STEP_KIND_VERIFY: StepKind
STEP_KIND_RESUME: StepKind

class Sampling(_message.Message):
    __slots__ = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "allowed_token_ids", "bad_token_sequences")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    logit_bias: _containers.ScalarMap[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, logit_bias: _Optional[_Mapping[int, float]] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("address", "layers")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    address: str
    layers: _model_pb2.LayerRange
    def __init__(self, address: _Optional[str] = ..., layers: _Optional[_Union[_model_pb2.LayerRange, _Mapping]] = ...) -> None: ...

class DraftRoute(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class BatchRoute(_message.Message):
    __slots__ = ("batches_id", "stream_id")
    BATCHES_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    batches_id: int
    stream_id: int
    def __init__(self, batches_id: _Optional[int] = ..., stream_id: _Optional[int] = ...) -> None: ...

class SessionRest(_message.Message):
    __slots__ = ("session_id", "rest_ms", "token_ids", "first_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REST_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    rest_ms: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_position: int
    def __init__(self, session_id: _Optional[str] = ..., rest_ms: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_position: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request_id", "fingerprint", "stage", "layers", "route", "max_length", "max_rows", "block_rows", "prompt_length", "sampling", "stop_token_ids", "draft", "logprobs", "grammar", "traceparent", "lane", "exact_rows", "prompt_logprobs", "holder_id", "batches", "rest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    EXACT_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: str
    stage: int
    layers: _model_pb2.LayerRange
    route: _containers.RepeatedCompositeFieldContainer[Hop]
    max_length: int
    max_rows: int
    block_rows: int
    prompt_length: int
    sampling: Sampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft: DraftRoute
    logprobs: int
    grammar: Grammar
    traceparent: str
    lane: _shared_memory_pb2.FrameLane
    exact_rows: int
    prompt_logprobs: int
    holder_id: str
    batches: BatchRoute
    rest: SessionRest
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., stage: _Optional[int] = ..., layers: _Optional[_Union[_model_pb2.LayerRange, _Mapping]] = ..., route: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., max_length: _Optional[int] = ..., max_rows: _Optional[int] = ..., block_rows: _Optional[int] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., draft: _Optional[_Union[DraftRoute, _Mapping]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., traceparent: _Optional[str] = ..., lane: _Optional[_Union[_shared_memory_pb2.FrameLane, _Mapping]] = ..., exact_rows: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., holder_id: _Optional[str] = ..., batches: _Optional[_Union[BatchRoute, _Mapping]] = ..., rest: _Optional[_Union[SessionRest, _Mapping]] = ...) -> None: ...

class ForwardFromTokens(_message.Message):
    __slots__ = ("step", "base_position", "token_ids", "kind", "propose_tokens", "more", "least_accepted")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LEAST_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    step: int
    base_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kind: StepKind
    propose_tokens: int
    more: int
    least_accepted: int
    def __init__(self, step: _Optional[int] = ..., base_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[StepKind, str]] = ..., propose_tokens: _Optional[int] = ..., more: _Optional[int] = ..., least_accepted: _Optional[int] = ...) -> None: ...

class StepLimit(_message.Message):
    __slots__ = ("last_step", "propose_tokens")
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    last_step: int
    propose_tokens: int
    def __init__(self, last_step: _Optional[int] = ..., propose_tokens: _Optional[int] = ...) -> None: ...

class ForwardFromActivation(_message.Message):
    __slots__ = ("step", "base_position", "token_ids", "kind", "propose_tokens", "activation", "features", "more", "features_follow", "least_accepted")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LEAST_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    step: int
    base_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kind: StepKind
    propose_tokens: int
    activation: _tensor_pb2.Tensor
    features: _containers.RepeatedCompositeFieldContainer[FeatureSlice]
    more: int
    features_follow: bool
    least_accepted: int
    def __init__(self, step: _Optional[int] = ..., base_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[StepKind, str]] = ..., propose_tokens: _Optional[int] = ..., activation: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., features: _Optional[_Iterable[_Union[FeatureSlice, _Mapping]]] = ..., more: _Optional[int] = ..., features_follow: _Optional[bool] = ..., least_accepted: _Optional[int] = ...) -> None: ...

class StepFeatures(_message.Message):
    __slots__ = ("step", "features")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    step: int
    features: _containers.RepeatedCompositeFieldContainer[FeatureSlice]
    def __init__(self, step: _Optional[int] = ..., features: _Optional[_Iterable[_Union[FeatureSlice, _Mapping]]] = ...) -> None: ...

class BatchStep(_message.Message):
    __slots__ = ("stream_id", "forward")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    forward: ForwardFromActivation
    def __init__(self, stream_id: _Optional[int] = ..., forward: _Optional[_Union[ForwardFromActivation, _Mapping]] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("steps", "activation", "features")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[BatchStep]
    activation: _tensor_pb2.Tensor
    features: _containers.RepeatedCompositeFieldContainer[FeatureSlice]
    def __init__(self, steps: _Optional[_Iterable[_Union[BatchStep, _Mapping]]] = ..., activation: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., features: _Optional[_Iterable[_Union[FeatureSlice, _Mapping]]] = ...) -> None: ...

class BatchAnswer(_message.Message):
    __slots__ = ("stream_id", "commit", "proposal")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    commit: Commit
    proposal: Proposal
    def __init__(self, stream_id: _Optional[int] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ...) -> None: ...

class BatchAnswers(_message.Message):
    __slots__ = ("answers", "batches_read")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_READ_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[BatchAnswer]
    batches_read: int
    def __init__(self, answers: _Optional[_Iterable[_Union[BatchAnswer, _Mapping]]] = ..., batches_read: _Optional[int] = ...) -> None: ...

class BatchTokens(_message.Message):
    __slots__ = ("stream_ids", "steps", "token_ids")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream_ids: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FeatureSlice(_message.Message):
    __slots__ = ("capture_index", "start_position", "features")
    CAPTURE_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    capture_index: int
    start_position: int
    features: _tensor_pb2.Tensor
    def __init__(self, capture_index: _Optional[int] = ..., start_position: _Optional[int] = ..., features: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class StageIdentity(_message.Message):
    __slots__ = ("location", "layers", "held_length")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HELD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    location: _failure_pb2.Location
    layers: _model_pb2.LayerRange
    held_length: int
    def __init__(self, location: _Optional[_Union[_failure_pb2.Location, _Mapping]] = ..., layers: _Optional[_Union[_model_pb2.LayerRange, _Mapping]] = ..., held_length: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("stages", "lane", "step_lane", "batches")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEP_LANE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageIdentity]
    lane: bool
    step_lane: bool
    batches: bool
    def __init__(self, stages: _Optional[_Iterable[_Union[StageIdentity, _Mapping]]] = ..., lane: _Optional[bool] = ..., step_lane: _Optional[bool] = ..., batches: _Optional[bool] = ...) -> None: ...

class StageTiming(_message.Message):
    __slots__ = ("forward_ns", "elapsed_ns", "passed_bytes")
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_NS_FIELD_NUMBER: _ClassVar[int]
    PASSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    forward_ns: int
    elapsed_ns: int
    passed_bytes: int
    def __init__(self, forward_ns: _Optional[int] = ..., elapsed_ns: _Optional[int] = ..., passed_bytes: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "length", "token_ids", "timings", "logprobs", "more", "followed", "prompt_logprobs", "batch_sessions", "batch_rows", "propose_tokens", "batch_proposing")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_PROPOSING_FIELD_NUMBER: _ClassVar[int]
    step: int
    length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    timings: _containers.RepeatedCompositeFieldContainer[StageTiming]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    more: int
    followed: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    batch_sessions: int
    batch_rows: int
    propose_tokens: int
    batch_proposing: int
    def __init__(self, step: _Optional[int] = ..., length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., timings: _Optional[_Iterable[_Union[StageTiming, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., more: _Optional[int] = ..., followed: _Optional[bool] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., batch_sessions: _Optional[int] = ..., batch_rows: _Optional[int] = ..., propose_tokens: _Optional[int] = ..., batch_proposing: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("step", "token_ids", "elapsed_ns", "followed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_NS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    step: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    elapsed_ns: int
    followed: bool
    def __init__(self, step: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., elapsed_ns: _Optional[int] = ..., followed: _Optional[bool] = ...) -> None: ...
