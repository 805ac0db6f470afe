from flashsplit.shard.v1 import draft_pb2 as _draft_pb2
from flashsplit.shard.v1 import snapshot_pb2 as _snapshot_pb2
from flashsplit.shard.v1 import stage_pb2 as _stage_pb2
from flashsplit.shard.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunDraftRequest(_message.Message):
    __slots__ = ("open", "feature_slice", "propose", "chunk", "snapshot_save", "snapshot_restore")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SLICE_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SAVE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_RESTORE_FIELD_NUMBER: _ClassVar[int]
    open: _draft_pb2.DraftOpen
    feature_slice: _stage_pb2.FeatureSlice
    propose: _draft_pb2.Propose
    chunk: _tensor_pb2.TensorChunk
    snapshot_save: _snapshot_pb2.SnapshotSave
    snapshot_restore: _snapshot_pb2.SnapshotRestore
    def __init__(self, open: _Optional[_Union[_draft_pb2.DraftOpen, _Mapping]] = ..., feature_slice: _Optional[_Union[_stage_pb2.FeatureSlice, _Mapping]] = ..., propose: _Optional[_Union[_draft_pb2.Propose, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ..., snapshot_save: _Optional[_Union[_snapshot_pb2.SnapshotSave, _Mapping]] = ..., snapshot_restore: _Optional[_Union[_snapshot_pb2.SnapshotRestore, _Mapping]] = ...) -> None: ...

class RunDraftResponse(_message.Message):
    __slots__ = ("opened", "proposed", "chunk", "snapshot_part")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PART_FIELD_NUMBER: _ClassVar[int]
    opened: _draft_pb2.DraftOpened
    proposed: _draft_pb2.Proposed
    chunk: _tensor_pb2.TensorChunk
    snapshot_part: _snapshot_pb2.SnapshotPart
    def __init__(self, opened: _Optional[_Union[_draft_pb2.DraftOpened, _Mapping]] = ..., proposed: _Optional[_Union[_draft_pb2.Proposed, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ..., snapshot_part: _Optional[_Union[_snapshot_pb2.SnapshotPart, _Mapping]] = ...) -> None: ...
