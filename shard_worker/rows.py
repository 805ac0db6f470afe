"""The rows of one step as every layer of a segment sees them: positions, rotary table, masks. Made once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.model_config import LayerKind, ModelConfig
from shard_worker.ops.attention import grouped_mask, visibility
from shard_worker.ops.rope import rope_table


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows of one step.

    positions: int64 [n]. rope: from `rope_table`. span: cache slots to attend over. masks: by layer kind; None where
    every row sees the whole span. deferred: the rows are guesses, so recurrent layers must not advance.
    """

    positions: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    span: int
    masks: dict[LayerKind, torch.Tensor | None]
    deferred: bool


def make_rows(
    config: ModelConfig,
    kinds: frozenset[LayerKind],
    frequencies: torch.Tensor,
    like: torch.Tensor,
    base_position: int,
    count: int,
    span: int,
    deferred: bool,
) -> Rows:
    """Rows at [base_position, base_position + count) for layers of these kinds, in `like`'s dtype and device.

    span: cache slots to attend over, at least up to the last row; slots behind that are masked.
    """
    device = like.device
    positions = torch.arange(base_position, base_position + count, device=device)
    masks: dict[LayerKind, torch.Tensor | None] = {}
    for kind in kinds - {LayerKind.LINEAR}:
        window = config.sliding_window if kind is LayerKind.SLIDING else None
        if window is not None and span <= window:
            window = None
        if count == 1 and window is None and span == base_position + 1:
            masks[kind] = None
            continue
        seen = visibility(positions, torch.arange(span, device=device), causal=True, window=window)
        masks[kind] = grouped_mask(seen, config.heads // config.kv_heads, like.dtype)
    return Rows(positions, rope_table(positions, frequencies, like.dtype), span, masks, deferred)
