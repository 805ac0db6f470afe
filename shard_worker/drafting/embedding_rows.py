"""A few rows of the target's embedding for a draft, scaled as the target's are: from a resident matrix, or from the
mapped checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.errors import InvalidArgument
from services.model.families import read_model_config
from services.model.target_tensors import loaded_bytes
from shard_worker.device.devices import Device, describe
from shard_worker.device.dtypes import dtype_to_name
from shard_worker.stage.stage import Stage
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.scaled_rows import scaled_rows
from shard_worker.weights.tiled import TiledWeight
from shard_worker.weights.unread import in_memory
from shard_worker.weights.weight import DenseWeight, RowLookup

MAX_COPY_SHARE = 0.1
"""The share of a GPU's free memory that a copy of the embedding may take: the rest is for sessions."""

EmbeddingRows = Callable[[tuple[int, ...]], torch.Tensor]
"""Looks up n token ids: returns their rows of the embedding, [n, hidden]."""


def rows_of_stage(matrix: RowLookup | None, checkpoint: Checkpoint) -> EmbeddingRows:
    """Return a lookup in a resident matrix [vocab, hidden] where there is one, else in the checkpoint's file."""
    if matrix is None:
        return rows_of_checkpoint(checkpoint)
    return lambda token_ids: matrix.lookup(torch.tensor(token_ids))


def resident_embedding(stage: Stage) -> RowLookup | None:
    """Return the whole matrix [vocab, hidden] where a stage has it, else None.

    A stage has it as its embedding, or as a tied lm_head whose rows are in order.
    """
    if stage.embedding is None and stage.config.tied_head and stage.head is not None:
        matrix = stage.head.weight
        in_order = isinstance(matrix, DenseWeight | TiledWeight)
        return scaled_rows(matrix, stage.config.embedding_scale, stage.dtype) if in_order else None
    return stage.embedding


def copied_embedding(checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> RowLookup | None:
    """Return a copy of the whole matrix on a GPU that has plenty of room left, None elsewhere.

    There a draft can look up a token that the host does not know yet.
    """
    name = matrix_name(checkpoint, "embed_tokens.weight")
    size = loaded_bytes(name, checkpoint.headers[name], dtype_to_name(dtype))
    if not device.is_gpu or size > MAX_COPY_SHARE * describe(device).free_bytes:
        return None
    scale = read_model_config(checkpoint.config).embedding_scale
    return scaled_rows(in_memory(checkpoint.weight(name, device.torch_device, dtype)), scale, dtype)


def rows_of_checkpoint(checkpoint: Checkpoint) -> EmbeddingRows:
    """Return a lookup in the checkpoint's mapped file. Raises InvalidArgument when it has no embedding."""
    name = matrix_name(checkpoint, "embed_tokens.weight")
    scale = read_model_config(checkpoint.config).embedding_scale

    def lookup(token_ids: tuple[int, ...]) -> torch.Tensor:
        rows = checkpoint.rows(name, token_ids)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    return lookup


def matrix_name(checkpoint: Checkpoint, suffix: str) -> str:
    """Return the full name of the tensor whose name ends so, outside vision and MTP parts.

    Raises InvalidArgument when there is none.
    """
    for name in sorted(checkpoint.headers):
        if name.endswith(suffix) and not name.startswith(("mtp.", "model.visual.", "visual.")):
            return name
    raise InvalidArgument(f"{checkpoint.directory} has no tensor named *{suffix}", field=suffix)
