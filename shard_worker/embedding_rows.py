"""A few rows of the target's embedding for a draft: from a resident matrix, or from the mapped checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from services.errors import InvalidArgument
from shard_worker.checkpoint import Checkpoint
from shard_worker.stage import Stage

EmbeddingRows = Callable[[tuple[int, ...]], torch.Tensor]
"""Token ids -> [n, hidden]."""


def rows_of_stage(stage: Stage, checkpoint: Checkpoint) -> EmbeddingRows:
    """The stage's own embedding or tied lm_head where it has one, else the checkpoint's file."""
    matrix = resident_embedding(stage)
    if matrix is None:
        return rows_of_checkpoint(checkpoint)
    resident = matrix

    def lookup(token_ids: tuple[int, ...]) -> torch.Tensor:
        return F.embedding(torch.tensor(token_ids, device=resident.device), resident)

    return lookup


def resident_embedding(stage: Stage) -> torch.Tensor | None:
    """The whole matrix [vocab, hidden], where the stage has it as its embedding, or as a tied lm_head with its rows in
    order."""
    if stage.embedding is None and stage.config.tied_head and stage.head is not None:
        return None if stage.head.weight.is_mkldnn else stage.head.weight
    return stage.embedding


def rows_of_checkpoint(checkpoint: Checkpoint) -> EmbeddingRows:
    """Raises InvalidArgument when the checkpoint has no embedding."""
    name = matrix_name(checkpoint, "embed_tokens.weight")
    return lambda token_ids: checkpoint.rows(name, token_ids)


def matrix_name(checkpoint: Checkpoint, suffix: str) -> str:
    """Full name of the one tensor that ends so, outside vision and MTP parts."""
    for name in sorted(checkpoint.names):
        if name.endswith(suffix) and not name.startswith(("mtp.", "model.visual.", "visual.")):
            return name
    raise InvalidArgument(f"{checkpoint.directory} has no tensor named *{suffix}", field=suffix)
