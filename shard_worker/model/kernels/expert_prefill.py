"""Many rows through the routed experts of a mixture: what `layers.experts` does between its router and its end.

Plain torch takes the experts one by one, some six small launches each, and waits for the router's counts before: a GPU
stands still most of the time. Here rows are sorted by expert on the device, in tiles as high as matrix units are fast
with, and both products take all tiles in a launch each.
"""

from __future__ import annotations

import functools

import torch
import triton

from shard_worker.device import devices
from shard_worker.device.devices import KernelTarget
from shard_worker.model.kernels import matmul
from shard_worker.model.kernels.codes import Form
from shard_worker.model.kernels.experts import Mixed, Routed, forms_of, multiply
from shard_worker.model.kernels.matmul import Config
from shard_worker.model.layer_weights import ExpertsWeights

_PACKED_ROWS = 64
"""Rows of the tiles that packed matrices are asked for; registers may allow fewer."""

_USUAL_ROWS, _FEW = 1024, 96
"""Rows of a prompt that usually come at a time; and up to so many of an expert, tiles of 64 rows have fewer that are
empty than higher ones would."""


def run(weights: ExpertsWeights, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the sum of what the routed experts make of rows x [n, hidden], [n, hidden] in their element type.

    shares: [n, k], of each of the experts `chosen`, int64 [n, k], that a row goes through; what they make is added in
    this order.
    """
    together = weights.together
    assert together is not None
    (rows, hidden), size = x.shape, together.down.columns
    experts, target = weights.router.rows, devices.kernel_target(x.device)
    # The same for any number of rows: so it is compiled once, and a row comes out the same.
    height = 64 if weights.chosen * _USUAL_ROWS <= _FEW * experts else 128
    cuts = [
        choose(form, width, depth, first, x.dtype.itemsize, height, target)
        for form, width, depth, first in zip(
            forms_of(together), (size, hidden), (hidden, size), (True, False), strict=True
        )
    ]
    height = min(cut.height for cut in cuts)
    order, tiles = sort(chosen, experts, height)
    routed = Routed(shares.reshape(-1).float(), None, order, tiles, alone=False, mixed=False)
    out = torch.empty_like(x)
    no_norm = torch.ones(rows, dtype=torch.float32, device=x.device)
    multiply(weights, x, None, no_norm, routed, [cut._replace(height=height) for cut in cuts], Mixed(out))
    return out


def sort(chosen: torch.Tensor, experts: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `Routed` calls order and tiles, for the experts [n, k] of n rows. Nothing is awaited on the host.

    An expert's rows keep their order. There are as many tiles as there may be; those that are not needed have none.
    """
    device, pairs = chosen.device, chosen.numel()
    experts_of, order = chosen.reshape(-1).sort(stable=True)
    bounds = torch.searchsorted(experts_of, torch.arange(experts + 1, device=device))
    counts = bounds.diff()
    each = (counts + height - 1) // height
    ends = each.cumsum(0)
    slots = torch.arange(pairs // height + min(experts, pairs), device=device)
    own = torch.searchsorted(ends, slots, right=True)
    there = own < experts
    own = own.clamp(max=experts - 1)
    behind = (slots - ends[own] + each[own]) * height
    tiles = torch.stack(
        [
            torch.where(there, own, -1),
            bounds[own] + behind,
            (counts[own] - behind).clamp(max=height),
            torch.zeros_like(slots),
        ],
        dim=1,
    )
    return order.int(), tiles.int()


@functools.cache
def choose(
    form: Form | None, width: int, depth: int, first: bool, size: int, height: int, target: KernelTarget | None
) -> Config:
    """Return how a product with experts' matrices is cut for tiles of so many rows. Not tried on any GPU.

    form: of packed ones, whose tiles may be less high. first: the product has gates and ups, so two tiles of weights
    and two of sums. size: of an element, in bytes.
    """
    if form is not None:
        cut = matmul.choose_packed(form, width, depth, first, None, size, target, min(height, _PACKED_ROWS))
        # Of many rows there are programs enough.
        return cut._replace(serial=cut.split > 1)
    few = matmul.few_registers(target) or size != 2
    wide = 32 if few else 64 if first else 128
    height = 32 if few else height
    deep = max(16, min(128 // size, triton.next_power_of_2(depth)))
    matrices = 2 if first else 1
    warps = 8 if height * wide * matrices >= 128 * 128 else 4
    shared = 64 << 10 if target is None else target.shared_bytes
    stage = (height + wide * matrices) * deep * size
    return Config(wide, deep, warps=warps, stages=max(2, min(4, shared // stage)), height=height)
