"""A few rows of the target's embedding for a draft: from a resident matrix, or from the mapped checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from services.errors import InvalidArgument
from shard_worker.device.devices import Device, describe
from shard_worker.stage.stage import Stage
from shard_worker.weights.checkpoint import Checkpoint

MOST_OF_FREE = 0.1
"""Of a GPU's free memory for a copy: the rest is for sessions."""

EmbeddingRows = Callable[[tuple[int, ...]], torch.Tensor]
"""Token ids -> [n, hidden]."""


def rows_of_stage(matrix: torch.Tensor | None, checkpoint: Checkpoint) -> EmbeddingRows:
    """Of a resident matrix where there is one, else of the checkpoint's file."""
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


def copied_embedding(checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole matrix on a GPU that has plenty of room left: there a draft can look up a token that the host does not
    know yet. None elsewhere."""
    name = matrix_name(checkpoint, "embed_tokens.weight")
    size = math.prod(checkpoint.shape(name)) * dtype.itemsize
    if not device.is_gpu or size > MOST_OF_FREE * describe(device).free_bytes:
        return None
    return checkpoint.place(name, device.torch_device, dtype)


def rows_of_checkpoint(checkpoint: Checkpoint) -> EmbeddingRows:
    """Raises InvalidArgument when the checkpoint has no embedding."""
    name = matrix_name(checkpoint, "embed_tokens.weight")
    return lambda token_ids: checkpoint.rows(name, token_ids)


def matrix_name(checkpoint: Checkpoint, suffix: str) -> str:
    """Full name of the one tensor that ends so, outside vision and MTP parts."""
    for name in sorted(checkpoint.headers):
        if name.endswith(suffix) and not name.startswith(("mtp.", "model.visual.", "visual.")):
            return name
    raise InvalidArgument(f"{checkpoint.directory} has no tensor named *{suffix}", field=suffix)
