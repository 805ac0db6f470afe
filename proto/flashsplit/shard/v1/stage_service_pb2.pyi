from flashsplit.shard.v1 import failure_pb2 as _failure_pb2
from flashsplit.shard.v1 import snapshot_pb2 as _snapshot_pb2
from flashsplit.shard.v1 import stage_pb2 as _stage_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ForgetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ForgetSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunBatchesRequest(_message.Message):
    __slots__ = ("open", "step_batch", "chunk")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    open: BatchesOpen
    step_batch: _stage_pb2.StepBatch
    chunk: _tensor_pb2.TensorChunk
    def __init__(self, open: _Optional[_Union[BatchesOpen, _Mapping]] = ..., step_batch: _Optional[_Union[_stage_pb2.StepBatch, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ...) -> None: ...

class RunBatchesResponse(_message.Message):
    __slots__ = ("opened", "batch_answers")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    BATCH_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    opened: BatchesOpened
    batch_answers: _stage_pb2.BatchAnswers
    def __init__(self, opened: _Optional[_Union[BatchesOpened, _Mapping]] = ..., batch_answers: _Optional[_Union[_stage_pb2.BatchAnswers, _Mapping]] = ...) -> None: ...

class BatchesOpen(_message.Message):
    __slots__ = ("batches_id",)
    BATCHES_ID_FIELD_NUMBER: _ClassVar[int]
    batches_id: int
    def __init__(self, batches_id: _Optional[int] = ...) -> None: ...

class BatchesOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunStageRequest(_message.Message):
    __slots__ = ("open", "forward_from_tokens", "forward_from_activation", "chunk", "snapshot_save", "snapshot_restore", "step_features", "step_batch", "step_limit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FROM_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SAVE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_RESTORE_FIELD_NUMBER: _ClassVar[int]
    STEP_FEATURES_FIELD_NUMBER: _ClassVar[int]
    STEP_BATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_LIMIT_FIELD_NUMBER: _ClassVar[int]
    open: _stage_pb2.Open
    forward_from_tokens: _stage_pb2.ForwardFromTokens
    forward_from_activation: _stage_pb2.ForwardFromActivation
    chunk: _tensor_pb2.TensorChunk
    snapshot_save: _snapshot_pb2.SnapshotSave
    snapshot_restore: _snapshot_pb2.SnapshotRestore
    step_features: _stage_pb2.StepFeatures
    step_batch: _stage_pb2.StepBatch
    step_limit: _stage_pb2.StepLimit
    def __init__(self, open: _Optional[_Union[_stage_pb2.Open, _Mapping]] = ..., forward_from_tokens: _Optional[_Union[_stage_pb2.ForwardFromTokens, _Mapping]] = ..., forward_from_activation: _Optional[_Union[_stage_pb2.ForwardFromActivation, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ..., snapshot_save: _Optional[_Union[_snapshot_pb2.SnapshotSave, _Mapping]] = ..., snapshot_restore: _Optional[_Union[_snapshot_pb2.SnapshotRestore, _Mapping]] = ..., step_features: _Optional[_Union[_stage_pb2.StepFeatures, _Mapping]] = ..., step_batch: _Optional[_Union[_stage_pb2.StepBatch, _Mapping]] = ..., step_limit: _Optional[_Union[_stage_pb2.StepLimit, _Mapping]] = ...) -> None: ...

class RunStageResponse(_message.Message):
    __slots__ = ("opened", "commit", "proposal", "failure", "snapshot_saved", "snapshot_restored", "batch_answers", "batch_tokens")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SAVED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_RESTORED_FIELD_NUMBER: _ClassVar[int]
    BATCH_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    opened: _stage_pb2.Opened
    commit: _stage_pb2.Commit
    proposal: _stage_pb2.Proposal
    failure: _failure_pb2.Failure
    snapshot_saved: _snapshot_pb2.SnapshotSaved
    snapshot_restored: _snapshot_pb2.SnapshotRestored
    batch_answers: _stage_pb2.BatchAnswers
    batch_tokens: _stage_pb2.BatchTokens
    def __init__(self, opened: _Optional[_Union[_stage_pb2.Opened, _Mapping]] = ..., commit: _Optional[_Union[_stage_pb2.Commit, _Mapping]] = ..., proposal: _Optional[_Union[_stage_pb2.Proposal, _Mapping]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., snapshot_saved: _Optional[_Union[_snapshot_pb2.SnapshotSaved, _Mapping]] = ..., snapshot_restored: _Optional[_Union[_snapshot_pb2.SnapshotRestored, _Mapping]] = ..., batch_answers: _Optional[_Union[_stage_pb2.BatchAnswers, _Mapping]] = ..., batch_tokens: _Optional[_Union[_stage_pb2.BatchTokens, _Mapping]] = ...) -> None: ...
