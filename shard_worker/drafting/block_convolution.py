"""The convolutions over a block's rows before and behind a sublayer, in plain torch.

Each mixes a row with those before it in the block. Part of its kernels is learned as it is, part is made of the
sublayer's input, one number for a group of neighbouring elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from shard_worker.model.layer_weights import BlockConvolution


def around(
    convolution: BlockConvolution,
    sublayer: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    earlier: Sequence[torch.Tensor],
    batch_invariant_rows: int | None,
) -> torch.Tensor:
    """Return what a sublayer makes of rows x [n, hidden], with its input and its output convolved.

    earlier: as of `earlier_rows`, of at least so many taps. batch_invariant_rows: as in `Rows`.
    """
    _, taps, hidden = convolution.base.shape
    added = convolution.projection.matmul(x, None, batch_invariant_rows).view(len(x), 2, taps, -1).float()
    kernels = convolution.base + added.repeat_interleave(hidden // added.shape[-1], -1)
    return _convolved(sublayer(_convolved(x, kernels[:, 0], earlier)), kernels[:, 1], earlier)


def earlier_rows(counts: Sequence[int], taps: int, device: torch.device) -> list[torch.Tensor]:
    """Return for each tap the row that stands so many rows before each row in its block, int64 [n]; n, for which there
    is none, where it would be before the block.

    counts: rows of each block, one block's behind the other's.
    """
    places = [place for count in counts for place in range(count)]
    return [
        torch.tensor([row - tap if tap <= place else len(places) for row, place in enumerate(places)], device=device)
        for tap in range(taps)
    ]


def _convolved(x: torch.Tensor, kernels: torch.Tensor, earlier: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows [n, hidden], each the sum of itself and those before it by its kernels [n, taps, hidden]."""
    padded = F.pad(x, (0, 0, 0, 1)).float()
    total = padded[:-1] * kernels[:, 0]
    for tap in range(1, kernels.shape[1]):
        total = total + padded[earlier[tap]] * kernels[:, tap]
    return total.to(x.dtype)
