"""Per-layer embeddings by kernels against plain torch, and layers of Gemma 4 as a whole."""

from __future__ import annotations

import pytest
import torch

from shard_worker.model.per_layer import PerLayerInputs
from shard_worker.ops.activation import geglu, swiglu
from shard_worker.stage.per_layer_rows import PerLayerRows
from shard_worker.stage.step_runner import StepRunner
from shard_worker.weights.scaled_rows import scaled_rows
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, seldom
from tests.shard_worker.tiny import Tiny, ids, load_stage

pytestmark = pytest.mark.gpu

HIDDEN, LAYERS, FIRST, OWN = 48, 4, 1, 3
"""Of a stage: how many layers the model has, the stage's first one, and how many it has itself."""


def inputs_of(size: int) -> PerLayerInputs:
    """Those of a stage's layers, with tables in the host's memory."""
    on, generator = device().torch_device, torch.Generator().manual_seed(size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return PerLayerInputs(
        embedding=scaled_rows(DenseWeight(random(20, HIDDEN).to(DTYPE)), HIDDEN**0.5, DTYPE),
        table=scaled_rows(DenseWeight(random(20, LAYERS * size).to(DTYPE)), size**0.5, DTYPE),
        columns=slice(FIRST * size, (FIRST + OWN) * size),
        projection=DenseWeight(random(OWN * size, HIDDEN).to(on, DTYPE)),
        scale=HIDDEN**-0.5,
        norm=torch.rand(size, generator=generator).to(on) + 0.5,
        eps=1e-6,
    )


@pytest.mark.parametrize(("size", "embedded"), [(8, True), (24, False)])
@torch.inference_mode()
def test_inputs_are_made_of_what_is_sent(size: int, embedded: bool) -> None:
    """Of tokens of two sessions, with the embeddings that the device has or those that are sent, as plain torch makes
    them; a row alone has the same bits. Two steps may be on their way."""
    inputs, on, token_ids = inputs_of(size), device().torch_device, (3, 17, 3, 0, 19)
    rows = PerLayerRows(inputs, torch.zeros(6, HIDDEN, dtype=DTYPE, device=on), embedded=embedded, twins=2)
    entered = inputs.embedding.lookup(torch.tensor(token_ids)).to(on, DTYPE)
    nothing = torch.zeros_like(entered)

    rows.fill(0, token_ids[:2], turn=1)
    rows.fill(2, token_ids[2:], turn=1)
    rows.fill(0, token_ids[1:2], turn=0)
    rows.send(5, turn=1)
    together = rows.inputs(entered if embedded else nothing)
    rows.send(1, turn=0)
    alone = rows.inputs(entered[1:2] if embedded else nothing[:1])

    assert together.shape == (OWN, 5, size)
    torch.testing.assert_close(together, inputs.of(token_ids).transpose(0, 1), rtol=1e-2, atol=1e-2)
    assert torch.equal(alone[:, 0], together[:, 1])


@pytest.mark.parametrize("gelu", [True, False])
@torch.inference_mode()
def test_a_product_gates_what_a_row_has_of_its_own(gelu: bool) -> None:
    """As the same product does whose gates are multiplied by it in plain torch."""
    from shard_worker.model.kernels.matmul import linear

    on, generator = device().torch_device, torch.Generator().manual_seed(2)
    x, weight, own = (
        torch.randn(shape, generator=generator).to(on, DTYPE) for shape in ((3, HIDDEN), (24, HIDDEN), (3, 24))
    )
    found, nothing = linear(x, weight, residual=own, gates_residual=True, gelu=gelu)

    gates = torch.cat([linear(x, weight)[0], own], 1).float()
    torch.testing.assert_close(found.float(), (geglu if gelu else swiglu)(gates), rtol=1e-2, atol=1e-2)
    assert nothing is None


@pytest.mark.parametrize(("name", "layers"), [seldom("gemma4-experts", (0, 2)), seldom("gemma4-sharing", (2, 6))])
@torch.inference_mode()
def test_layers_of_gemma_4_are_those_of_plain_torch(tiny: Tiny, name: str, layers: tuple[int, int]) -> None:
    """Experts beside a dense part; a later stage, with embeddings for each layer, some of which share keys and values:
    a row behind a few others comes as near to that of float32 as plain torch does."""
    token_ids, made = ids(4), []
    # Of these rows the last one's experts are chosen by so much that no rounding chooses others.
    drawn = torch.randn(4, 64, generator=torch.Generator().manual_seed(47))
    for dtype, by_kernels in ((DTYPE, True), (DTYPE, False), (torch.float32, False)):
        stage = load_stage(tiny.path(name), layers, devices=[device()], dtype=str(dtype).removeprefix("torch."))
        [segment] = stage.segments
        rows = drawn.to(segment.device.torch_device, dtype)
        state = stage.allocate(16, 1)
        stage.run(state, rows[:3], None, uncommitted=False, token_ids=token_ids[:3])
        if by_kernels:
            runner = StepRunner(segment, None, None, graphs=ON_GPU)
            output = runner.run(token_ids[3:], rows[3:], 3, state.caches[0], None, uncommitted=False)
            made.append(output.hidden.float().clone())
        else:
            made.append(stage.run(state, rows[3:], None, uncommitted=False, token_ids=token_ids[3:]).float())
    own, usual, exact = made
    assert (own - exact).norm() < max(1.5 * (usual - exact).norm(), 2e-3 * exact.norm())
