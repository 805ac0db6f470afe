"""Per-layer embeddings: what a token brings to each layer by itself, beside the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import RowLookup, Weight


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Makes the inputs of some layers out of token ids.

    embedding: the model's, scaled. table: [vocab, layers of the model * size], scaled. columns: those of the table that
    belong to these layers. projection: of rows of the embedding, [layers * size, hidden]; what it makes is multiplied
    by `scale`. norm: float32 [size].
    """

    embedding: RowLookup
    table: RowLookup
    columns: slice
    projection: Weight
    scale: float
    norm: torch.Tensor
    eps: float

    def of(self, token_ids: Sequence[int], batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Return the inputs [n, layers, size] of tokens. batch_invariant_rows: as in `Rows`."""
        device, dtype, size = self.projection.device, self.projection.dtype, len(self.norm)
        ids = torch.tensor(tuple(token_ids))
        rows = self.embedding.lookup(ids).to(device, dtype)
        projected = self.projection.matmul(rows, None, batch_invariant_rows) * self.scale
        own = self.table.lookup(ids)[:, self.columns].to(device, dtype)
        normed = rms_norm(projected.view(len(ids), -1, size), self.norm, self.eps)
        return (normed + own.view(normed.shape)) * 2**-0.5
