"""Mixtures of experts by kernels, dense and packed, against a dense restatement, and a row alone against the same row
among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from services.model.config import Activation, ClampedSwiGlu, SigmoidRouting
from shard_worker.model.layer_weights import ExpertsTogether, ExpertsWeights, MlpWeights
from shard_worker.model.rows import RowOperations, Rows
from shard_worker.weights.random_packed import KINDS, random_packed
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.weight import DenseWeight, Weight
from tests.shard_worker.model.kernels.machine import DTYPE, LANE_COLUMNS, ON_GPU, device, seldom

pytestmark = pytest.mark.gpu

EPS = 1e-6
WHERE = device().torch_device
PACKED_NORM = 32
"""What the norm before packed experts is multiplied by, so that what these make is no smaller than the rows."""


def mixture(
    experts: int = 6,
    chosen: int = 2,
    hidden: int = 96,
    size: int = 40,
    *,
    shared: int | None = None,
    normalised: bool = True,
    clamped: ClampedSwiGlu | None = None,
    packed: tuple[str, str] | None = None,
    dtype: torch.dtype = DTYPE,
) -> ExpertsWeights:
    """A random mixture. shared: the size of a shared expert; None for none. clamped: how experts gate, which have
    biases then, as the router does. packed: what gates and ups, and downs are packed in, of KINDS."""
    generator = torch.Generator().manual_seed(experts)

    def random(rows: int, columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(WHERE, kind)

    def swiglu(inner: int) -> MlpWeights:
        return MlpWeights(DenseWeight(random(2 * inner, hidden)), DenseWeight(random(hidden, inner)))

    # Behind a large norm the router's choice is as close as behind a small one.
    steep = 2 if packed is None else 2 / PACKED_NORM
    scores = random(experts + (0 if shared is None else 1), hidden, torch.float32) * steep
    made: list[tuple[Weight, Weight]] = []
    for number in range(experts):
        shapes = ((2 * size, hidden), (hidden, size))
        if packed is None:
            one, other = (DenseWeight(random(*shape)) for shape in shapes)
        else:
            one, other = (random_tiled(kind, *shape, number, dtype) for kind, shape in zip(packed, shapes, strict=True))
        made.append((one, other))
    gate_ups, downs = map(below_each_other, zip(*made, strict=True))
    both = random(experts, 2 * size) * (2 * size) ** 0.5 if clamped else None
    last = random(experts, hidden) * hidden**0.5 if clamped else None
    return ExpertsWeights(
        router=DenseWeight(scores[:experts]),
        experts=tuple(
            MlpWeights(
                one,
                other,
                None if both is None else both[number],
                None if last is None else last[number],
                clamped or Activation.SILU,
            )
            for number, (one, other) in enumerate(zip(gate_ups[1], downs[1], strict=True))
        ),
        chosen=chosen,
        normalised=normalised,
        shared=None if shared is None else swiglu(shared),
        shared_gate=None if shared is None else DenseWeight(scores[experts:]),
        together=ExpertsTogether(
            scores,
            gate_ups[0],
            downs[0],
            None if both is None else both.flatten(),
            None if last is None else last.flatten(),
            clamped,
        ),
        router_bias=random(1, experts, torch.float32).flatten() * experts**0.5 if clamped else None,
    )


def random_tiled(kind: str, rows: int, columns: int, number: int, dtype: torch.dtype) -> Weight:
    """The tiles of a packed matrix, another one for each number."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(number)).to(WHERE)
    weight = random_packed(kind, rows, columns, dtype, WHERE).select_rows(order)
    return TiledWeight(weight, tiling_of(weight, lane_columns=LANE_COLUMNS))


def below_each_other(parts: Sequence[Weight]) -> tuple[Weight, list[Weight]]:
    """One matrix of all experts', and each where it is in that."""
    room = parts[0].room_for(len(parts))
    assert room is not None
    moved = [part.moved_into(room, index) for index, part in enumerate(parts)]
    return room, [part for part in moved if part is not None]


def elements(weight: Weight) -> torch.Tensor:
    """A matrix in double precision."""
    return (weight.unpacked() if isinstance(weight, TiledWeight) else weight.tensor).double()


def rows_of(weights: ExpertsWeights, rows: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    x = torch.randn(rows, weights.router.columns, generator=torch.Generator().manual_seed(rows))
    return x.to(WHERE, dtype)


def made_by(own: MlpWeights, row: torch.Tensor) -> torch.Tensor:
    """What an expert makes of a row in double precision."""
    of_both, of_down = (None if bias is None else bias.double() for bias in (own.gate_up_bias, own.down_bias))
    gate, up = F.linear(row, elements(own.gate_up), of_both).chunk(2, -1)
    if isinstance(own.activation, ClampedSwiGlu):
        limit, alpha = own.activation.limit, own.activation.alpha
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
    else:
        gelu = own.activation is Activation.GELU_TANH
        inner = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    return F.linear(inner, elements(own.down), of_down)


def expected(weights: ExpertsWeights, x: torch.Tensor, norm: torch.Tensor, *, beside: bool) -> torch.Tensor:
    """The residual x plus what the mixture makes of its norm, in float64."""

    # What kernels multiply by is rounded before the norm's factor is applied; a router of its own norm has it in its
    # weights, so that nothing is rounded that it sees.
    factors = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed = (x.float() * norm).to(x.dtype).double() * factors
    routed = x.double() * norm.double() * factors if beside else normed
    return x.double() + dense(weights, normed, routed)


def dense(weights: ExpertsWeights, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
    """What the mixture makes of rows x in float64, expert by expert for each row. routed: what the router sees."""
    result = torch.zeros_like(x)
    for row, one in enumerate(x):
        bias = None if weights.router_bias is None else weights.router_bias.double()
        scores = F.linear(routed[row], weights.router.tensor.double(), bias)
        shares = worth = scores.softmax(-1)
        if weights.sigmoid is not None and weights.choice_bias is not None:
            cap = weights.sigmoid.cap
            shares = (scores if cap is None else (scores / cap).tanh() * cap).sigmoid()
            worth = shares + weights.choice_bias
        # Equal rows of the router may come out of this product with other last bits.
        chosen = sorted(range(len(worth)), key=lambda expert: (-round(float(worth[expert]), 9), expert))
        chosen = chosen[: weights.chosen]
        whole = shares[chosen].sum() if weights.normalised else 1.0
        shares = shares * (1.0 if weights.sigmoid is None else weights.sigmoid.scale)
        shares = shares if weights.scales is None else shares * weights.scales
        for expert in chosen:
            result[row] += shares[expert] / whole * made_by(weights.experts[expert], one)
        if weights.shared is not None:
            gate = weights.shared_gate
            taken = 1.0 if gate is None else F.linear(one, gate.tensor.double()).sigmoid()
            result[row] += taken * made_by(weights.shared, one)
    return result


def norm_of(weights: ExpertsWeights) -> torch.Tensor:
    """The weight of the norm before the mixture: large for packed experts, whose elements are small."""
    norm = torch.rand(weights.router.columns, generator=torch.Generator().manual_seed(3)).to(WHERE) + 0.5
    return norm * PACKED_NORM if isinstance(weights.experts[0].gate_up, TiledWeight) else norm


@torch.inference_mode()
def check(weights: ExpertsWeights, x: torch.Tensor, *, beside: bool = False) -> torch.Tensor:
    """Near the dense result; each row alone, and all in another order, to the same bits. Return what was found.

    beside: the mixture stands beside a dense part, as of `ExpertsBesideWeights`.
    """
    from shard_worker.model.kernels import experts
    from shard_worker.model.kernels.matmul import arrivals, begin

    norm, stored = norm_of(weights), weights.together
    assert stored is not None
    with_norm = replace(weights, together=replace(stored, scores=stored.scores * norm))

    def mixed(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = begin(rows, norm, EPS)
        if beside:
            out, behind = experts.run(with_norm, normed, None, norm, EPS, None, routed=rows)
        else:
            out, behind = experts.run(weights, normed, rows, norm, EPS, None)
        assert behind is not None
        return out, behind.scaled, behind.squares

    together = mixed(x)
    exact = expected(weights, x, norm, beside=beside)
    near = 1e-5 if x.dtype is torch.float32 else 1e-2
    made = exact - x.double()
    exact = made if beside else exact
    assert (together[0].double() - exact).norm() < near * made.norm()
    squares = together[2].sum(1).double()
    assert (squares - exact.square().sum(-1)).norm() < near * squares.norm()
    assert not arrivals(WHERE).any()
    if ON_GPU:
        for one, turned in zip(together, mixed(x.flip(0)), strict=True):
            assert torch.equal(one, turned.flip(0))
        for row in range(len(x)):
            for one, alone in zip(together, mixed(x[row : row + 1]), strict=True):
                assert torch.equal(one[row : row + 1], alone)
    return together[0]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        *(
            (rows, dtype)
            for rows in (1, 3, *((16, 64, 200, 512) if ON_GPU else ()))
            for dtype in (DTYPE, torch.float32)
        ),
        (17, DTYPE),
        seldom(17, torch.float32),
    ],
)
def test_a_mixture_is_the_dense_one(rows: int, dtype: torch.dtype) -> None:
    """For one row, rows of one tile, and more; widths and depths that tiles do not divide."""
    # Where a second tile of rows is interpreted, experts are few and small.
    weights = mixture(dtype=dtype) if ON_GPU or rows < 16 else mixture(4, 2, 80, 24, dtype=dtype)
    check(weights, rows_of(weights, rows, dtype))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("used", "rows", "alone"),
    [
        (pytest.param if (used, alone) in ((0, False), (2, True), (2, False)) else seldom)(used, rows, alone)
        for used, rows in ((0, 3), (2, 3), (3, 3), (5, 40), (29, 40))
        for alone in (False, True)
    ],
)
def test_unused_rows_have_no_experts(used: int, rows: int, alone: bool) -> None:
    """Whatever stands in them, no expert is read for them, and the other rows have the same bits."""
    from shard_worker.model.kernels import experts
    from shard_worker.model.kernels.matmul import arrivals, begin
    from shard_worker.model.kernels.step_parameters import FIRST_PAGE, Places

    weights = mixture()
    norm, together, x = norm_of(weights), weights.together, rows_of(weights, rows)
    assert together is not None
    lines = torch.zeros(rows, FIRST_PAGE.value, dtype=torch.int64, device=WHERE)
    sessions = torch.full((rows,), -1, dtype=torch.int64, device=WHERE)
    lines[0, 1] = used
    sessions[:used] = torch.arange(used)
    places = Places(lines) if alone else Places(lines, sessions, torch.zeros_like(sessions))

    def mixed(seen: torch.Tensor, where: Places | None) -> torch.Tensor:
        out, _ = experts.run(weights, begin(seen, norm, EPS), seen, norm, EPS, None, places=where)
        return out[:used]

    odd = x.clone()
    odd[used:] = float("nan")
    plain, found = mixed(x, None), mixed(odd, places)
    torch.testing.assert_close(found, plain, rtol=0, atol=0 if ON_GPU else 1e-3)
    assert not arrivals(WHERE).any()
    scores = together.scores * norm
    _, everything = experts.route(weights, begin(x, norm, EPS), x, scores, 16)
    _, routed = experts.route(weights, begin(odd, norm, EPS), odd, scores, 16, places)
    own = everything.experts.view(rows, -1)[:used]
    assert torch.equal(routed.experts.view(rows, -1)[:used], own)
    assert set(routed.tiles[:, 0].tolist()) - {-1} == set(own.flatten().tolist())
    begun = routed.tiles[routed.tiles[:, 0] >= 0]
    assert begun[:, 2].sum() == own.numel()


@pytest.mark.parametrize("rows", [2, seldom(17)])
def test_a_shared_expert_and_shares_as_they_are(rows: int) -> None:
    """The shared expert has another size; shares do not sum up to 1."""
    weights = mixture(shared=48, normalised=False)
    check(weights, rows_of(weights, rows))


@pytest.mark.parametrize(("rows", "cap"), [(6, 1.5), seldom(17, None)])
def test_routers_of_sigmoids(rows: int, cap: float | None) -> None:
    """As GLM-4.5 and Laguna have them: biases decide which experts are chosen, some of which are far below 0; shares
    are scaled, and the shared expert has no gate."""
    weights = mixture(shared=48)
    assert weights.together is not None
    experts = weights.router.rows
    weights = replace(
        weights,
        sigmoid=SigmoidRouting("bias", 2.5, cap),
        choice_bias=torch.linspace(-3, 0.5, experts, device=WHERE)[torch.arange(experts, device=WHERE) * 5 % experts],
        shared_gate=None,
        together=replace(weights.together, scores=weights.together.scores[:experts].contiguous()),
    )
    check(weights, rows_of(weights, rows))


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("rows", [2, seldom(17)])
def test_biases_and_clamped_gates(rows: int, dtype: torch.dtype) -> None:
    """Of the router and of both products; some gates and ups are cut off, and their slope is another one."""
    weights = mixture(clamped=ClampedSwiGlu(0.7, 1.702), dtype=dtype)
    check(weights, rows_of(weights, rows, dtype))


def beside_dense(weights: ExpertsWeights) -> ExpertsWeights:
    """The same as Gemma 4 has experts: GELU in place of SiLU, and each one's shares are multiplied by its own scale."""
    assert weights.together is not None
    return replace(
        weights,
        experts=tuple(replace(own, activation=Activation.GELU_TANH) for own in weights.experts),
        scales=torch.linspace(0.5, 2, weights.router.rows, device=WHERE),
        together=replace(weights.together, gelu=True),
    )


@pytest.mark.parametrize(("rows", "dtype"), [(1, DTYPE), (3, torch.float32), seldom(17, DTYPE)])
def test_experts_beside_a_dense_part(rows: int, dtype: torch.dtype) -> None:
    """The router takes rows that have another norm, and nothing is added to what experts make."""
    check(beside_dense(mixture(dtype=dtype)), rows_of(mixture(), rows, dtype), beside=True)


@pytest.mark.parametrize(("packed", "rows"), [(("q4_k", "q6_k"), 2), seldom(("int4", "int4"), 17)])
def test_packed_experts_beside_a_dense_part(packed: tuple[str, str], rows: int) -> None:
    """Codes have offsets, so that sums of the rows are wanted, or none."""
    weights = beside_dense(mixture(4, 2, 128, 64, packed=packed))
    check(weights, rows_of(weights, rows), beside=True)


@pytest.mark.parametrize(
    ("packed", "rows"),
    [
        (("q4_k", "q6_k"), 1),
        seldom(("q6_k", "q4_k"), 17),
        *(((kind, kind), 3) for kind in (KINDS if ON_GPU else ("int4", "q8_0", "fp8", "q2_k"))),
    ],
)
def test_packed_experts(packed: tuple[str, str], rows: int) -> None:
    """Both products have forms of their own; a tile's rows and more."""
    weights = mixture(4, 2, 128, 64, packed=packed)
    check(weights, rows_of(weights, rows))


@pytest.mark.slow
@torch.inference_mode()
def test_parts_of_the_depth_are_summed_up_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program for each and by one for all; with biases and clamped gates, as gpt-oss has them."""
    from shard_worker.model.kernels import experts, matmul

    packed, choose = ("mxfp4", "mxfp4"), experts.choose_packed
    monkeypatch.setattr(matmul, "UNIT", 64)
    weights = mixture(2, 2, 192, 192, clamped=ClampedSwiGlu(0.7, 1.702), packed=packed, dtype=torch.float32)
    found = []
    for serial in (True, False):
        monkeypatch.setattr(
            experts, "choose_packed", lambda *of, serial=serial: choose(*of)._replace(split=2, serial=serial)
        )
        found.append(check(weights, rows_of(weights, 2, torch.float32)))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("rows", "packed"),
    [(5, None), seldom(18, None), (12, ("int4", "q4_k")), seldom(20, ("int4", "q8_0"))],
)
def test_all_rows_may_go_to_the_same_experts(rows: int, packed: tuple[str, str] | None) -> None:
    """More than a tile of them, which is lower for packed matrices; the others have none. All experts may be chosen,
    too."""
    weights = mixture() if packed is None else mixture(16, 2, 128, 64, packed=packed)
    assert weights.together is not None
    x = rows_of(weights, rows).abs()
    weights.together.scores[:] = -weights.together.scores.abs()
    weights.together.scores[-2:] *= -1
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


@torch.inference_mode()
def check_many(weights: ExpertsWeights, x: torch.Tensor, routed: torch.Tensor | None = None) -> None:
    """Rows of a prompt: near the dense result, and in another order to the same bits. routed: what the router sees,
    None for the rows."""
    from shard_worker.model.kernels import expert_prefill
    from shard_worker.model.kernels.matmul import arrivals

    routed = x if routed is None else routed
    shared = weights.shared
    beside = None if shared is None else torch.stack([made_by(shared, row.double()) for row in x]).to(x.dtype)
    found = expert_prefill.run(weights, x, routed, beside)
    exact = dense(weights, x.double(), routed.double())
    near = 1e-5 if x.dtype is torch.float32 else 1e-2
    assert (found.double() - exact).norm() < near * exact.norm()
    assert not arrivals(WHERE).any()
    if ON_GPU:
        turned = expert_prefill.run(weights, x.flip(0), routed.flip(0), None if beside is None else beside.flip(0))
        assert torch.equal(found, turned.flip(0))


@pytest.mark.parametrize(
    ("rows", "dtype"), [seldom(1, DTYPE), (1, torch.float32), (70, DTYPE), seldom(70, torch.float32)]
)
def test_rows_of_a_prompt(rows: int, dtype: torch.dtype) -> None:
    """One row, and more than tiles have."""
    weights = mixture(dtype=dtype)
    check_many(weights, rows_of(weights, rows, dtype))


@pytest.mark.parametrize("kind", ["q4_k", seldom("mxfp4")])
def test_rows_of_a_prompt_through_packed_experts(kind: str) -> None:
    weights = mixture(
        4, 2, 128, 64, packed=(kind, kind), clamped=ClampedSwiGlu(0.7, 1.702) if kind == "mxfp4" else None
    )
    check_many(weights, rows_of(weights, 40 if ON_GPU else 20) * PACKED_NORM)


@pytest.mark.slow
def test_rows_of_a_prompt_may_go_to_the_same_experts() -> None:
    """So that others have none; experts have GELU in place of SiLU, and a shared one stands beside."""
    weights = mixture(shared=48)
    assert weights.together is not None
    weights.together.scores[:] = -weights.together.scores.abs()
    weights.together.scores[4:] *= -1
    check_many(weights, rows_of(weights, 70).abs())
    weights = beside_dense(mixture())
    check_many(weights, rows_of(weights, 70), rows_of(weights, 70).flip(1))


@pytest.mark.slow
@torch.inference_mode()
def test_a_layer_takes_rows_of_a_prompt_at_once() -> None:
    """As it takes them one expert after the other, with the router and the shared expert around, or scales of experts
    whose gates have GELU."""
    from shard_worker.model.kernels import expert_prefill
    from shard_worker.model.layers import experts

    weights = mixture(shared=48, dtype=torch.float32)
    x = rows_of(weights, 70, torch.float32)
    at_once = Rows([], {}, RowOperations(mixture=expert_prefill.run))
    torch.testing.assert_close(experts.run(weights, x, at_once), experts.run(weights, x), rtol=1e-4, atol=1e-5)
    # Beside a dense part the router takes rows that have another norm, whose weights kernels of few rows have in its
    # own.
    weights, routed = beside_dense(mixture(dtype=torch.float32)), x.flip(1)
    assert weights.together is not None
    norm = torch.linspace(0.2, 3, weights.router.columns, device=WHERE)
    weights = replace(weights, together=replace(weights.together, scores=weights.together.scores * norm))
    found, plain = (experts.run(weights, x, rows, routed=routed) for rows in (at_once, None))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
@pytest.mark.parametrize("packed", [None, ("q4_k", "q6_k"), ("int4", "int4"), ("fp8", "fp8")])
def test_long_prompts_of_published_models(packed: tuple[str, str] | None) -> None:
    """Of 30B-A3B, for tiles of all heights."""
    weights = mixture(128, 8, 2048, 768, packed=packed)
    for rows in (600, 2048):
        check_many(weights, rows_of(weights, rows) * (1 if packed is None else PACKED_NORM))


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
@pytest.mark.parametrize("packed", [("q4_k", "q6_k"), ("q4_k", "q4_k"), ("int4", "int4"), ("fp8", "fp8")])
def test_packed_experts_of_published_models(packed: tuple[str, str]) -> None:
    """Of 30B-A3B, for a row, a block, and many rows."""
    weights = mixture(128, 8, 2048, 768, packed=packed)
    for rows in (1, 2, 8, 16, 64, 512):
        check(weights, rows_of(weights, rows))


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
def test_experts_of_gpt_oss() -> None:
    """Columns that only the smallest tiles divide, biases and clamped gates."""
    weights = mixture(32, 4, 2880, 2880, clamped=ClampedSwiGlu(7.0, 1.702), packed=("mxfp4", "mxfp4"))
    for rows in (1, 8, 16, 64, 512):
        check(weights, rows_of(weights, rows))


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
@pytest.mark.parametrize(("experts", "chosen", "size"), [(128, 8, 768), (256, 8, 512), (512, 10, 512)])
def test_shapes_of_published_models(experts: int, chosen: int, size: int) -> None:
    """With a shared expert of the same size, for a row, a block, and many rows."""
    weights = mixture(experts, chosen, 2048, size, shared=size if experts > 128 else None)
    for rows in (1, 16, 64, 512):
        check(weights, rows_of(weights, rows))


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
@pytest.mark.parametrize("packed", [None, ("int4", "int4"), ("q8_0", "q8_0")])
def test_experts_of_gemma_4(packed: tuple[str, str] | None) -> None:
    """Of 26B-A4B, dense and packed, for a row, a block, and many rows."""
    weights = beside_dense(mixture(128, 8, 2816, 704, packed=packed))
    for rows in (1, 16, 64, 512):
        check(weights, rows_of(weights, rows), beside=True)
