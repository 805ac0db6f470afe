"""What tokens bring to each layer by themselves, for rows of a step: `PerLayerInputs.of` behind its look-ups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.matmul import linear
from shard_worker.model.kernels.sums import whole_sum
from shard_worker.model.per_layer import PerLayerInputs


@triton.jit(do_not_specialize=["rows"])
def _join(projected, own, norm, out, rows, layers, size, scale, eps, BLOCK: tl.constexpr):
    """Compute a row's input of one layer, [size], as `make_inputs` says. It is rounded wherever the plain form is."""
    row, layer = tl.program_id(0), tl.program_id(1)
    kind = out.dtype.element_ty
    ns = tl.arange(0, BLOCK)
    kept = ns < size
    at = (row * layers + layer) * size + ns
    x = (tl.load(projected + at, mask=kept, other=0.0).to(tl.float32) * scale).to(kind).to(tl.float32)
    factor = tl.rsqrt(whole_sum(x * x, BLOCK) / size + eps)
    normed = (x * factor * tl.load(norm + ns, mask=kept, other=0.0)).to(kind).to(tl.float32)
    both = (normed + tl.load(own + at, mask=kept, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + (layer * rows + row) * size + ns, (both * 0.7071067811865476).to(kind), mask=kept)


def make_inputs(inputs: PerLayerInputs, embedded: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the inputs of rows for each layer, [layers, n, size].

    embedded: the rows' embeddings, [n, hidden]. own: what the layers' columns of the table have of them, [n, layers *
    size].
    """
    (rows, width), size = own.shape, len(inputs.norm)
    projected, _ = linear(embedded, inputs.projection)
    out = torch.empty((width // size, rows, size), dtype=own.dtype, device=own.device)
    _join[(rows, len(out))](
        projected, own, inputs.norm, out, rows, len(out), size, inputs.scale, inputs.eps,
        BLOCK=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return out
