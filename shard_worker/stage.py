"""A stage of the target: its segments, the embedding where it is first, the head where it is last.

Owns weights; a session's caches are in `StageState`. Knows nothing of processes, streams or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.layers import LayerRange
from shard_worker.caches import SegmentCaches
from shard_worker.features import Features
from shard_worker.head import Head
from shard_worker.model_config import ModelConfig
from shard_worker.prefix_state import GroupKind, TensorGroup
from shard_worker.segment import Segment


@dataclass(slots=True)
class StageState:
    """One session's memory on a stage. length: committed tokens; pending: rows of a verify not yet committed."""

    capacity: int
    caches: list[SegmentCaches]
    length: int = 0
    pending: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(caches.size_bytes for caches in self.caches)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, last) of the target. embedding: [vocab, hidden] on the first stage; head: on the last.

    captures: all target layers that the draft wants, here and elsewhere; summed: they travel as one sum, not as slices.
    """

    config: ModelConfig
    layers: LayerRange
    segments: tuple[Segment, ...]
    embedding: torch.Tensor | None
    head: Head | None
    dtype: torch.dtype
    weight_bytes: int
    captures: tuple[int, ...] = ()
    summed: bool = False

    @property
    def device(self) -> torch.device:
        return self.segments[0].device.torch_device

    def allocate(self, capacity: int, block_rows: int) -> StageState:
        """Memory for one session of up to `capacity` tokens."""
        caches = [segment.allocate(capacity, block_rows) for segment in self.segments]
        return StageState(capacity, caches)

    def state_groups(self) -> tuple[TensorGroup, ...]:
        """What is kept of a prefix, in the order of a session's views; the last stage's logits come last."""
        groups = [group for segment in self.segments for group in segment.state_groups()]
        if self.head is not None:
            weight = self.head.weight
            groups.append(TensorGroup(GroupKind.LOGITS, ("logits",), (weight.shape[0],), weight.dtype))
        return tuple(groups)

    def embed(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Rows of the embedding, [n, hidden]."""
        assert self.embedding is not None
        return F.embedding(torch.tensor(token_ids, device=self.embedding.device), self.embedding)

    def run(
        self, state: StageState, hidden: torch.Tensor, features: Features | None, *, deferred: bool
    ) -> torch.Tensor:
        """The stage's layers on rows [n, hidden] that follow the committed ones; captures are added to `features`.

        Rows count at once unless deferred: then `commit` says later how many of them do.
        """
        for segment, caches in zip(self.segments, state.caches, strict=True):
            hidden = segment.run(hidden, state.length, state.capacity, deferred, caches, features)
        if deferred:
            state.pending = len(hidden)
        else:
            state.length += len(hidden)
        return hidden

    def commit(self, state: StageState, length: int) -> None:
        """Let the rows up to `length` of the verify in flight count."""
        rows = length - state.length
        for caches in state.caches:
            caches.commit_block(rows)
        state.length, state.pending = length, 0
