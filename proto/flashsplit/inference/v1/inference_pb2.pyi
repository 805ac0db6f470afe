from flashsplit.inference.v1 import generation_pb2 as _generation_pb2
from flashsplit.inference.v1 import server_pb2 as _server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "sampling", "stopping", "speculate", "model", "logprobs", "grammar", "prefill_compression", "prefill_keep_ratio", "prompt_logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _generation_pb2.TokenIds
    sampling: _generation_pb2.Sampling
    stopping: _generation_pb2.Stopping
    speculate: bool
    model: str
    logprobs: int
    grammar: _generation_pb2.Grammar
    prefill_compression: _generation_pb2.PrefillCompression
    prefill_keep_ratio: float
    prompt_logprobs: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.Stopping, _Mapping]] = ..., speculate: _Optional[bool] = ..., model: _Optional[str] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[_generation_pb2.Grammar, _Mapping]] = ..., prefill_compression: _Optional[_Union[_generation_pb2.PrefillCompression, str]] = ..., prefill_keep_ratio: _Optional[float] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: _generation_pb2.Started
    delta: _generation_pb2.Delta
    finished: _generation_pb2.Finished
    def __init__(self, started: _Optional[_Union[_generation_pb2.Started, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_generation_pb2.Finished, _Mapping]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("conversation", "sampling", "stopping", "speculate", "model", "logprobs", "grammar", "prefill_compression", "prefill_keep_ratio", "prompt_logprobs")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    conversation: _generation_pb2.Conversation
    sampling: _generation_pb2.Sampling
    stopping: _generation_pb2.Stopping
    speculate: bool
    model: str
    logprobs: int
    grammar: _generation_pb2.Grammar
    prefill_compression: _generation_pb2.PrefillCompression
    prefill_keep_ratio: float
    prompt_logprobs: int
    def __init__(self, conversation: _Optional[_Union[_generation_pb2.Conversation, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.Stopping, _Mapping]] = ..., speculate: _Optional[bool] = ..., model: _Optional[str] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[_generation_pb2.Grammar, _Mapping]] = ..., prefill_compression: _Optional[_Union[_generation_pb2.PrefillCompression, str]] = ..., prefill_keep_ratio: _Optional[float] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: _generation_pb2.Started
    delta: _generation_pb2.Delta
    finished: _generation_pb2.Finished
    def __init__(self, started: _Optional[_Union[_generation_pb2.Started, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_generation_pb2.Finished, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_server_pb2.Model]
    def __init__(self, models: _Optional[_Iterable[_Union[_server_pb2.Model, _Mapping]]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: _server_pb2.ServerInfo
    def __init__(self, server: _Optional[_Union[_server_pb2.ServerInfo, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _server_pb2.Load
    def __init__(self, load: _Optional[_Union[_server_pb2.Load, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "conversation", "add_special_tokens", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    conversation: _generation_pb2.Conversation
    add_special_tokens: bool
    model: str
    def __init__(self, text: _Optional[str] = ..., conversation: _Optional[_Union[_generation_pb2.Conversation, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "model")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    model: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
