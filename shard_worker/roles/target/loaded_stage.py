"""A stage that is loaded: what it was loaded from, and what its sessions and their drafts share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.messages.loading import LoadTarget
from shard_worker.drafting.drafters import Draft
from shard_worker.drafting.embedding_rows import EmbeddingRows, copied_embedding, resident_embedding, rows_of_stage
from shard_worker.sampling.grammar_compiler import GrammarCompiler
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.stage.stage import Stage
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import DenseWeight, RowLookup


@dataclass(frozen=True, slots=True)
class TargetEmbedding:
    """The target's embedding, in which a draft looks up tokens.

    matrix: all of it, [vocab, hidden], where it is in this worker's memory, else None. rows: looks up single rows, in
    the matrix where there is one, else in the checkpoint's file.
    """

    matrix: RowLookup | None
    rows: EmbeddingRows

    @property
    def dense(self) -> torch.Tensor | None:
        """The matrix as one tensor, None where it is not here or packed."""
        return self.matrix.tensor if isinstance(self.matrix, DenseWeight) else None

    @classmethod
    def of(cls, stage: Stage, checkpoint: Checkpoint) -> TargetEmbedding:
        """Return the embedding as a loaded stage has it."""
        matrix = resident_embedding(stage)
        return cls(matrix, rows_of_stage(matrix, checkpoint))

    def beside(self, draft: Draft, stage: Stage, part: LoadTarget) -> TargetEmbedding:
        """Return the embedding with its matrix on the draft's device, where there is room for it."""
        if self.matrix is not None:
            return self
        checkpoint = open_checkpoint(part.model_path, quantization=part.quantization)
        matrix = copied_embedding(checkpoint, draft.device, stage.dtype)
        return TargetEmbedding(matrix, rows_of_stage(matrix, checkpoint))


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage, what it was loaded from, and what its sessions share.

    part: what the coordinator asked to load. family: the name of the model family. fingerprint: identifies the
    checkpoint. keeper: keeps prefixes of its sessions. grammars: compiles grammars for its vocabulary. invariant_rows:
    the numbers of rows for which batch-invariant steps have been tried out.
    """

    part: LoadTarget
    stage: Stage
    family: str
    fingerprint: str
    embedding: TargetEmbedding
    keeper: SnapshotKeeper
    grammars: GrammarCompiler
    invariant_rows: set[int]
