"""Tokens that are drawn by kernels are those that plain torch draws."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from services.messages.sampling import SamplingParams
from shard_worker.sampling import drawing
from shard_worker.sampling.drawing import NOT_FINITE, Draw
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, seldom

pytestmark = pytest.mark.gpu

VOCABULARY = 5000 if ON_GPU else 4200
"""More than a program's tokens."""

SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=2.0, top_k=700, min_p=0.001, top_p=0.999),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=50.0, top_p=0.3),
]


def draws_of(samplings: list[SamplingParams], first_position: int = 0) -> list[Draw]:
    return [Draw(sampling, first_position + row) for row, sampling in enumerate(samplings)]


def drawn(logits: torch.Tensor, draws: list[Draw], rows: list[int] | None = None) -> list[int]:
    """By kernels, behind these rows of the logits."""
    rows, on = list(range(len(draws))) if rows is None else rows, device().torch_device
    tokens, made = (torch.full((len(logits),), 77, device=on) for _ in range(2))
    drawing.queue_draws_into(tokens, logits.to(on), draws, rows, made)
    found = tokens.tolist()
    assert made.tolist() == [max(token, 0) for token in found]
    assert all(found[row] == 77 for row in range(len(logits)) if row not in rows)
    return [found[row] for row in rows]


def logits_of(rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "turns"),
    [(torch.float32, 1), *(seldom(dtype, 20) for dtype in (torch.bfloat16, torch.float16, torch.float32))],
    ids=str,
)
def test_tokens_are_those_of_plain_torch(dtype: torch.dtype, turns: int) -> None:
    """With all ways of leaving tokens out in one call, and each alone: the token of a row is the same."""
    for turn in range(turns):
        logits, draws = logits_of(len(SAMPLINGS), dtype, turn), draws_of(SAMPLINGS, 100 * turn)
        expected = drawing.draw(logits, draws)
        assert drawn(logits, draws) == expected
        for row in range(0, len(draws), 1 if ON_GPU else 8):
            assert drawn(logits[row : row + 1], [draws[row]]) == expected[row : row + 1]
    # Other rows than all, in any order.
    assert drawn(logits, [draws[4], draws[1]], [4, 1]) == [expected[4], expected[1]]


def test_all_that_are_as_probable_as_the_last_one_stay() -> None:
    """Of four tokens that share a place, and that reach a share, each is drawn; zeros of both signs are alike."""
    logits = torch.full((1, VOCABULARY), -4.0)
    logits[0, [3, 9, 500, 4100]] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    each = 20 if ON_GPU else 5
    samplings = [SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=0.1, top_p=0.4)]
    draws = draws_of([*samplings[:1] * each, *samplings[1:] * each])
    found = drawn(logits.to(DTYPE).repeat(2 * each, 1), draws)
    assert found == drawing.draw(logits.repeat(2 * each, 1), draws)
    assert {*found} == {3, 9, 500, 4100}
    assert not ON_GPU or {*found[:each]} == {*found[each:]} == {*found}


def test_forbidden_tokens_are_never_drawn_and_broken_rows_leave_the_others_theirs() -> None:
    logits = logits_of(5, DTYPE)
    logits[0, :4100] = -float("inf")
    logits[1, 17] = float("nan")
    logits[2] = -float("inf")
    logits[3, 5] = float("inf")
    draws = draws_of([SAMPLINGS[1], SAMPLINGS[0], SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[0]])
    found = drawn(logits, draws)
    assert found[0] >= 4100
    assert found[1:4] == [NOT_FINITE] * 3
    assert found == drawing.draw(logits, draws)
