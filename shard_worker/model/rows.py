"""The rows of one step as every layer of a segment sees them: positions, rotary table, masks. Made once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.model.config import LayerKind, ModelConfig
from shard_worker.ops.attention import Causal, grouped_mask, visibility
from shard_worker.ops.rope import rope_table


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows of one step.

    base: position of the first one. rope: from `rope_table`. masks: by layer kind; None where every row sees all
    positions up to the last row's. deferred: the rows are guesses, so recurrent layers must not advance. kernels,
    delta_kernels: as a segment has them. exact_rows: as of a session; None where a row need not come out the same in
    steps of different numbers of rows.
    """

    base: int
    rope: tuple[torch.Tensor, torch.Tensor]
    masks: dict[LayerKind, torch.Tensor | Causal | None]
    uncommitted: bool
    kernels: bool = False
    delta_kernels: bool = False
    batch_invariant_rows: int | None = None

    def each(self, work: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        """An elementwise function of rows [n, …], given one by one where they must be exact: functions made of exp
        round differently in the lanes of a vector and behind the last whole one."""
        if self.batch_invariant_rows is None or len(tensor) == 1:
            return work(tensor)
        return torch.cat([work(row) for row in tensor.chunk(len(tensor))])


def make_rows(
    config: ModelConfig,
    kinds: frozenset[LayerKind],
    frequencies: torch.Tensor,
    like: torch.Tensor,
    base: int,
    count: int,
    uncommitted: bool,
    *,
    kernels: bool = False,
    delta_kernels: bool = False,
    batch_invariant_rows: int | None = None,
) -> Rows:
    """Rows at [base, base + count) for layers of these kinds, in `like`'s dtype and device."""
    device, span = like.device, base + count
    positions = torch.arange(base, span, device=device)
    if batch_invariant_rows is not None:
        tables = [rope_table(position, frequencies, like.dtype) for position in positions.chunk(count)]
        cos, sin = (torch.cat(tensors) for tensors in zip(*tables, strict=True))
        return Rows(base, (cos, sin), {}, uncommitted, kernels, delta_kernels, batch_invariant_rows)
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
    return Rows(base, rope_table(positions, frequencies, like.dtype), masks, uncommitted, kernels, delta_kernels)
