from flashsplit.shard.v1 import failure_pb2 as _failure_pb2
from flashsplit.shard.v1 import stage_pb2 as _stage_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunStageRequest(_message.Message):
    __slots__ = ("open", "forward_from_tokens", "forward_from_activation", "chunk")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FROM_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    open: _stage_pb2.Open
    forward_from_tokens: _stage_pb2.ForwardFromTokens
    forward_from_activation: _stage_pb2.ForwardFromActivation
    chunk: _tensor_pb2.TensorChunk
    def __init__(self, open: _Optional[_Union[_stage_pb2.Open, _Mapping]] = ..., forward_from_tokens: _Optional[_Union[_stage_pb2.ForwardFromTokens, _Mapping]] = ..., forward_from_activation: _Optional[_Union[_stage_pb2.ForwardFromActivation, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ...) -> None: ...

class RunStageResponse(_message.Message):
    __slots__ = ("opened", "commit", "proposal", "failure")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opened: _stage_pb2.Opened
    commit: _stage_pb2.Commit
    proposal: _stage_pb2.Proposal
    failure: _failure_pb2.Failure
    def __init__(self, opened: _Optional[_Union[_stage_pb2.Opened, _Mapping]] = ..., commit: _Optional[_Union[_stage_pb2.Commit, _Mapping]] = ..., proposal: _Optional[_Union[_stage_pb2.Proposal, _Mapping]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...
