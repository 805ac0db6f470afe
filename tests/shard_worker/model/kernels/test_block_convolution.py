"""The convolutions over blocks and the selector's walk, against plain torch."""

from __future__ import annotations

import pytest
import torch

from shard_worker.drafting.block_convolution import around, earlier_rows
from shard_worker.drafting.choosers import GuessedRows
from shard_worker.drafting.choosers.dflash2 import Selector
from shard_worker.model.layer_weights import BlockConvolution
from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.model.kernels.machine import DTYPE, device

pytestmark = pytest.mark.gpu

SESSIONS, HIDDEN, VOCAB = 4, 192, 300


def random(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device().torch_device, dtype)


def blocks_of(counts: list[int], rows: int):  # type: ignore[no-untyped-def]
    """Where blocks of so many rows stand, one behind the other; a single one by itself."""
    from shard_worker.model.kernels.step_parameters import StepParameters

    together = len(counts) > 1
    parameters = StepParameters(device().torch_device, 3, rows=rows, sessions=SESSIONS if together else None)
    if together:
        parameters.begin()
        for number, count in enumerate(counts):
            parameters.add(number, sum(counts[:number]), 20, count)
    else:
        parameters.fill(20, counts[0])
    parameters.send()
    parameters.record_launch()
    return parameters.places(rows)


@pytest.mark.parametrize(("counts", "taps", "group"), [([8], 3, 64), ([5, 1, 8], 2, 16)])
@torch.inference_mode()
def test_a_sublayer_between_convolutions(counts: list[int], taps: int, group: int) -> None:
    """Of normed rows, before and behind, with the residual: what plain torch makes of each block, and rows of nobody
    behind them harm none."""
    from shard_worker.model.kernels.block_convolution import convolve
    from shard_worker.model.kernels.matmul import begin, linear

    rows, count = 16, sum(counts)
    x, norm = random(rows, HIDDEN, seed=1), 1 + random(HIDDEN, seed=2, dtype=torch.float32) / 8
    base = random(2, taps, HIDDEN, seed=3, dtype=torch.float32) / 2
    projection = DenseWeight(random(2 * taps * HIDDEN // group, HIDDEN, seed=4) / HIDDEN**0.5 / 4)
    places = blocks_of(counts, rows)

    normed = begin(x, norm, 1e-6)
    added, _ = linear(normed, projection)
    inner = convolve(normed, added, base, 0, places) * 2
    found = convolve(inner, added, base, 1, places, x)[:count]

    expected = x[:count] + around(
        BlockConvolution(base, projection),
        lambda rows: rows * 2,
        rms_norm(x[:count], norm, 1e-6),
        earlier_rows(counts, taps, x.device),
        None,
    )
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("counts", "candidates", "rank"), [([8], 16, 64), ([5, 1, 8], 5, 24)])
@torch.inference_mode()
def test_a_walk_takes_what_fits_the_token_before(counts: list[int], candidates: int, rank: int) -> None:
    """The tokens of each session's block are those of plain torch; the rows of known tokens are left as they were."""
    from shard_worker.model.kernels.select_tokens import select_tokens

    rows, known = sum(counts), [7 + 50 * number for number in range(len(counts))]
    logits = random(rows, VOCAB, seed=1, dtype=torch.float32) * 2
    hidden, projection = random(rows, 32, seed=2), DenseWeight(random(rank, 32, seed=3) / 32**0.5)
    predecessors, successors = (random(VOCAB, rank, seed=seed) for seed in (4, 5))
    chosen = torch.full((rows,), -5, device=logits.device)
    tokens_before = torch.zeros(SESSIONS if len(counts) > 1 else 1, dtype=torch.int64)
    tokens_before[: len(known)] = torch.tensor(known)

    largest, whose = logits.topk(candidates, -1)
    weighing = projection.matmul(hidden)
    places = blocks_of(counts, rows)
    select_tokens(largest, whose, weighing, predecessors, successors, tokens_before.to(logits.device), places, chosen)

    firsts = [sum(counts[:number]) for number in range(len(counts))]
    guessed = [row for row in range(rows) if row not in firsts]
    drafting = [number for number, count in enumerate(counts) if count > 1]
    selector = Selector(projection, predecessors, successors, candidates)
    expected = selector.choose(
        GuessedRows(
            hidden[guessed],
            logits[guessed],
            [known[number] for number in drafting],
            [counts[number] - 1 for number in drafting],
            lambda rows: rows,
        )
    )
    assert chosen[guessed].tolist() == expected.tolist()
    assert chosen[guessed].tolist() != logits[guessed].argmax(-1).tolist()
    assert set(chosen[firsts].tolist()) == {-5}
