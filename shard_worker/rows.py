"""The rows of one step as every layer of a segment sees them: positions, rotary table, masks. Made once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.model_config import LayerKind, ModelConfig
from shard_worker.ops.attention import Causal, grouped_mask, visibility
from shard_worker.ops.rope import rope_table


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows of one step.

    base: position of the first one. rope: from `rope_table`. masks: by layer kind; None where every row sees all
    positions up to the last row's. deferred: the rows are guesses, so recurrent layers must not advance. kernels,
    delta_kernels: as a segment has them.
    """

    base: int
    rope: tuple[torch.Tensor, torch.Tensor]
    masks: dict[LayerKind, torch.Tensor | Causal | None]
    deferred: bool
    kernels: bool = False
    delta_kernels: bool = False


def make_rows(
    config: ModelConfig,
    kinds: frozenset[LayerKind],
    frequencies: torch.Tensor,
    like: torch.Tensor,
    base: int,
    count: int,
    deferred: bool,
    *,
    kernels: bool = False,
    delta_kernels: bool = False,
) -> Rows:
    """Rows at [base, base + count) for layers of these kinds, in `like`'s dtype and device."""
    device, span = like.device, base + count
    positions = torch.arange(base, span, device=device)
    masks: dict[LayerKind, torch.Tensor | Causal | None] = {}
    for kind in kinds - {LayerKind.LINEAR}:
        window = config.sliding_window if kind is LayerKind.SLIDING else None
        if window is not None and span <= window:
            window = None
        if window is None and count == 1:
            masks[kind] = None
        elif window is None and like.is_cuda and like.dtype.itemsize == 2:
            masks[kind] = Causal()
        else:
            seen = visibility(positions, torch.arange(span, device=device), causal=True, window=window)
            masks[kind] = grouped_mask(seen, config.heads // config.kv_heads, like.dtype)
    return Rows(base, rope_table(positions, frequencies, like.dtype), masks, deferred, kernels, delta_kernels)
