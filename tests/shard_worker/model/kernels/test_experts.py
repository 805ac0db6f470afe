"""Mixtures of experts by kernels against a dense restatement, and a row alone against the same row among others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from services.model.config import Activation, ClampedSwiGlu
from shard_worker.model.layer_weights import ExpertsTogether, ExpertsWeights, MlpWeights
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device

pytestmark = pytest.mark.gpu

EPS = 1e-6
WHERE = device().torch_device


def mixture(
    experts: int = 6,
    chosen: int = 2,
    hidden: int = 96,
    size: int = 40,
    *,
    shared: int | None = None,
    normalised: bool = True,
    clamped: ClampedSwiGlu | None = None,
    dtype: torch.dtype = DTYPE,
) -> ExpertsWeights:
    """A random mixture. shared: the size of a shared expert; None for none. clamped: how experts gate, which have
    biases then, as the router does."""
    generator = torch.Generator().manual_seed(experts)

    def random(rows: int, columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(WHERE, kind)

    def swiglu(inner: int) -> MlpWeights:
        return MlpWeights(DenseWeight(random(2 * inner, hidden)), DenseWeight(random(hidden, inner)))

    scores = random(experts + (0 if shared is None else 1), hidden, torch.float32) * 2
    gate_up, down = random(experts * 2 * size, hidden), random(experts * hidden, size)
    both = random(experts, 2 * size) * (2 * size) ** 0.5 if clamped else None
    last = random(experts, hidden) * hidden**0.5 if clamped else None
    made = zip(gate_up.chunk(experts), down.chunk(experts), strict=True)
    return ExpertsWeights(
        router=DenseWeight(scores[:experts]),
        experts=tuple(
            MlpWeights(
                DenseWeight(one),
                DenseWeight(other),
                None if both is None else both[number],
                None if last is None else last[number],
                clamped or Activation.SILU,
            )
            for number, (one, other) in enumerate(made)
        ),
        chosen=chosen,
        normalised=normalised,
        shared=None if shared is None else swiglu(shared),
        shared_gate=None if shared is None else DenseWeight(scores[experts:]),
        together=ExpertsTogether(
            scores,
            DenseWeight(gate_up),
            DenseWeight(down),
            None if both is None else both.flatten(),
            None if last is None else last.flatten(),
            clamped,
        ),
        router_bias=random(1, experts, torch.float32).flatten() * experts**0.5 if clamped else None,
    )


def rows_of(weights: ExpertsWeights, rows: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    x = torch.randn(rows, weights.router.columns, generator=torch.Generator().manual_seed(rows))
    return x.to(WHERE, dtype)


def expected(weights: ExpertsWeights, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The residual x plus what the mixture makes of its norm, in float64, expert by expert for each row."""

    def swiglu(own: MlpWeights, row: torch.Tensor) -> torch.Tensor:
        of_both, of_down = (None if bias is None else bias.double() for bias in (own.gate_up_bias, own.down_bias))
        gate, up = F.linear(row, own.gate_up.tensor.double(), of_both).chunk(2, -1)
        gated = F.silu(gate) * up
        if isinstance(own.activation, ClampedSwiGlu):
            limit, alpha = own.activation.limit, own.activation.alpha
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            gated = (up + 1) * gate * torch.sigmoid(alpha * gate)
        return F.linear(gated, own.down.tensor.double(), of_down)

    # What kernels multiply by is rounded before the norm's factor is applied.
    scaled = (x.float() * norm).to(x.dtype).double()
    normed = scaled * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    result = x.double().clone()
    for row, one in enumerate(normed):
        bias = None if weights.router_bias is None else weights.router_bias.double()
        shares = F.linear(one, weights.router.tensor.double(), bias).softmax(-1)
        # Equal rows of the router may come out of this product with other last bits.
        chosen = sorted(range(len(shares)), key=lambda expert: (-round(float(shares[expert]), 9), expert))
        chosen = chosen[: weights.chosen]
        whole = shares[chosen].sum() if weights.normalised else 1.0
        for expert in chosen:
            result[row] += shares[expert] / whole * swiglu(weights.experts[expert], one)
        if weights.shared is not None and weights.shared_gate is not None:
            taken = F.linear(one, weights.shared_gate.tensor.double()).sigmoid()
            result[row] += taken * swiglu(weights.shared, one)
    return result


def norm_of(weights: ExpertsWeights) -> torch.Tensor:
    return torch.rand(weights.router.columns, generator=torch.Generator().manual_seed(3)).to(WHERE) + 0.5


@torch.inference_mode()
def check(weights: ExpertsWeights, x: torch.Tensor) -> None:
    """Near the dense result; each row alone, and all in another order, to the same bits."""
    from shard_worker.model.kernels import experts
    from shard_worker.model.kernels.matmul import arrivals, begin

    norm = norm_of(weights)

    def mixed(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, behind = experts.run(weights, begin(rows, norm, EPS), rows, norm, EPS, None)
        assert behind is not None
        return out, behind.scaled, behind.squares

    together = mixed(x)
    exact = expected(weights, x, norm)
    near = 1e-5 if x.dtype is torch.float32 else 1e-2
    assert (together[0].double() - exact).norm() < near * (exact - x.double()).norm()
    squares = together[2].sum(1).double()
    assert (squares - exact.square().sum(-1)).norm() < near * squares.norm()
    assert not arrivals(WHERE).any()
    if ON_GPU:
        for one, turned in zip(together, mixed(x.flip(0)), strict=True):
            assert torch.equal(one, turned.flip(0))
        for row in range(len(x)):
            for one, alone in zip(together, mixed(x[row : row + 1]), strict=True):
                assert torch.equal(one[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 17, *([16, 64, 200, 512] if ON_GPU else [])])
def test_a_mixture_is_the_dense_one(rows: int, dtype: torch.dtype) -> None:
    """For one row, rows of one tile, and more; widths and depths that tiles do not divide."""
    weights = mixture(dtype=dtype)
    check(weights, rows_of(weights, rows, dtype))


@pytest.mark.parametrize("rows", [2, 17])
def test_a_shared_expert_and_shares_as_they_are(rows: int) -> None:
    """The shared expert has another size; shares do not sum up to 1."""
    weights = mixture(shared=48, normalised=False)
    check(weights, rows_of(weights, rows))


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("rows", [2, 17])
def test_biases_and_clamped_gates(rows: int, dtype: torch.dtype) -> None:
    """Of the router and of both products; some gates and ups are cut off, and their slope is another one."""
    weights = mixture(clamped=ClampedSwiGlu(0.7, 1.702), dtype=dtype)
    check(weights, rows_of(weights, rows, dtype))


@pytest.mark.parametrize("rows", [5, 18])
def test_all_rows_may_go_to_the_same_experts(rows: int) -> None:
    """More than a tile of them; the others have none. All experts may be chosen, too."""
    weights = mixture()
    assert weights.together is not None
    x = rows_of(weights, rows).abs()
    weights.together.scores[:] = -weights.together.scores.abs()
    weights.together.scores[4:] *= -1
    check(weights, x)
    if rows == 5:
        check(replace(weights, chosen=6), x)


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    """Whatever other experts stand between."""
    weights = mixture()
    assert weights.together is not None
    scores = weights.together.scores
    scores[1:] = scores[1]
    scores[0] = -scores[1]
    check(weights, rows_of(weights, 4))


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
@pytest.mark.parametrize(("experts", "chosen", "size"), [(128, 8, 768), (256, 8, 512), (512, 10, 512)])
def test_shapes_of_published_models(experts: int, chosen: int, size: int) -> None:
    """With a shared expert of the same size, for a row, a block, and many rows."""
    weights = mixture(experts, chosen, 2048, size, shared=size if experts > 128 else None)
    for rows in (1, 16, 64, 512):
        check(weights, rows_of(weights, rows))
