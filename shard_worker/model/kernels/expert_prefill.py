"""Many rows through a mixture of experts: what `layers.experts` does around its shared expert.

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
from shard_worker.model.kernels import product_cuts
from shard_worker.model.kernels.codes import Form
from shard_worker.model.kernels.experts import Mixed, forms_of, multiply, route
from shard_worker.model.kernels.matmul import Normed
from shard_worker.model.kernels.product_cuts import Config
from shard_worker.model.layer_weights import ExpertsWeights

_PACKED_ROWS = 64
"""Rows of the tiles that packed matrices are asked for; registers may allow fewer."""

_USUAL_ROWS, _FEW = 1024, 96
"""Rows of a prompt that usually come at a time; and up to so many of an expert, tiles of 64 rows have fewer that are
empty than higher ones would."""


def run(
    weights: ExpertsWeights, x: torch.Tensor, routed: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what a mixture makes of rows x [n, hidden], [n, hidden] in their element type.

    routed: what the router takes of the rows, [n, hidden]. shared: what the shared expert makes of them, [n, hidden],
    which is added times the row's share of it; None without one.
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
    # Their norm has been applied.
    factors = torch.ones(rows, dtype=torch.float32, device=x.device)
    # Those of `together` may have the weights of the router's norm in them; there is no gate beside them then.
    scores = together.scores if weights.shared_gate is not None else weights.router.tensor
    _, placed = route(weights, Normed(x, factors[:, None], 0.0, factors), routed, scores, height)
    out = torch.empty_like(x)
    multiply(weights, x, None, factors, placed, [cut._replace(height=height) for cut in cuts], Mixed(out, shared))
    return out


@functools.cache
def choose(
    form: Form | None, width: int, depth: int, first: bool, size: int, height: int, target: KernelTarget | None
) -> Config:
    """Return how a product with experts' matrices is cut for tiles of so many rows. Not tried on any GPU.

    form: of packed ones, whose tiles may be less high. first: the product has gates and ups, so two tiles of weights
    and two of sums. size: of an element, in bytes.
    """
    if form is not None:
        cut = product_cuts.choose_packed(form, width, depth, first, None, size, target, min(height, _PACKED_ROWS))
        # Of many rows there are programs enough.
        return cut._replace(serial=cut.split > 1)
    few = product_cuts.few_registers(target) or size != 2
    wide = 32 if few else 64 if first else 128
    height = 32 if few else height
    deep = max(16, min(128 // size, triton.next_power_of_2(depth)))
    matrices = 2 if first else 1
    warps = 8 if height * wide * matrices >= 128 * 128 else 4
    shared = 64 << 10 if target is None else target.shared_bytes
    stage = (height + wide * matrices) * deep * size
    return Config(wide, deep, warps=warps, stages=max(2, min(4, shared // stage)), height=height)
