"""Draft tokens that are accepted by chance, chosen on the device, against the same on the host."""

from __future__ import annotations

import random

import pytest
import torch

from shard_worker.model.synthetic_acceptance import SyntheticAcceptance
from tests.shard_worker.model.kernels.machine import device
from tests.shard_worker.model.kernels.test_accept import VOCAB, place

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("together", [False, True])
def test_rows_are_chosen_that_the_host_would_choose(together: bool) -> None:
    """Rows of any sessions and positions; rows that no draft token follows, and those of nobody, stay as they are."""
    from shard_worker.model.kernels.step_parameters import StepParameters
    from shard_worker.model.kernels.synthetic import choose

    where, draw = device().torch_device, random.Random(3)
    synthetic = SyntheticAcceptance(0.5, VOCAB, where)
    step = StepParameters(where, 5, rows=64, sessions=6 if together else None)
    for _ in range(4):
        counts = [draw.choice((1, 2, 5, 16)) for _ in range(draw.randint(2, 4) if together else 1)]
        bases = [draw.randint(0, 40_000) for _ in counts]
        tokens = [[draw.randrange(VOCAB) for _ in range(count)] for count in counts]
        place([step], bases, counts, tokens, together)
        chosen = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(sum(counts)))
        found = chosen.to(where)

        choose(synthetic, step.tokens, step.places(64), found)

        first = 0
        for base, count, own in zip(bases, counts, tokens, strict=True):
            rows = slice(first, first + count)
            assert found[rows].tolist() == synthetic.choose(own, base, chosen[rows].tolist())
            first += count
        assert torch.equal(found[first:].cpu(), chosen[first:])
