"""Which rows of several sessions' steps count, decided on the device, against the same on the host; and the rows that
blocks begin with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from shard_worker.sampling.acceptance import accept as accept_on_host
from tests.shard_worker.model.kernels.machine import device

if TYPE_CHECKING:
    from shard_worker.model.kernels.step_parameters import StepParameters

pytestmark = pytest.mark.gpu

HIDDEN, VOCAB, SESSIONS = 40, 90, 6


@pytest.mark.parametrize("together", [False, True])
def test_rows_count_that_the_host_would_count(together: bool) -> None:
    """Steps of any rows and stop tokens: how many count, the tokens, where blocks begin, and what follows them. What is
    not decided here counts nothing; all rows of a prompt count, and produce one token."""
    from shard_worker.model.kernels.accept import ACCEPTED, ASKED, STOPS, UNDECIDED, WHOLE, accept
    from shard_worker.model.kernels.step_parameters import BASE, ROWS, StepParameters

    where, draw, seen = device().torch_device, random.Random(2), set()
    sessions = SESSIONS if together else None
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)).to(where)
    step = StepParameters(where, 5, rows=64, sessions=sessions)
    appending, proposing = (StepParameters(where, 3, rows=64, sessions=sessions, copies=2) for _ in range(2))
    for _ in range(12 if together else 24):
        number_of_sessions = draw.randint(2, SESSIONS - 1) if together else 1
        kinds = [draw.choice((ACCEPTED, UNDECIDED, WHOLE)) if together else ACCEPTED for _ in range(number_of_sessions)]
        counts = [draw.choice((1, 2, 5, 8, *([13] if kind is WHOLE else []))) for kind in kinds]
        bases = [draw.randint(0, 500) for _ in counts]
        tokens = [[draw.randrange(VOCAB) for _ in range(count)] for count in counts]
        chosen = [[*one[1:], draw.randrange(VOCAB)] for one in tokens]
        for one in chosen:
            # Some draft tokens are wrong, and stop tokens come now and then.
            if draw.random() < 0.6:
                one[draw.randrange(len(one))] = draw.randrange(VOCAB)
        stops = [frozenset(draw.sample(range(VOCAB), draw.choice((0, 1, STOPS)))) for _ in counts]
        place([step, appending, proposing], bases, counts, tokens, together)

        asked = torch.zeros((sessions or 1, ASKED), dtype=torch.int64)
        for number, (stop, kind) in enumerate(zip(stops, kinds, strict=True)):
            asked[number] = torch.tensor([kind.value, *stop, *[-1] * (STOPS - len(stop))])
        outcome = torch.full((len(asked) + 64,), -5, device=where)
        known = torch.zeros((len(asked), HIDDEN), device=where)
        known_tokens = torch.full((len(asked),), -5, device=where)
        flat = torch.tensor([token for one in chosen for token in one], device=where)
        accept(step, flat, asked.to(where), outcome, appending, proposing, embedding, known, known_tokens, 8)

        first, numbers = len(asked), outcome.tolist()
        belonging = appending.places(64).sessions
        for number, count in enumerate(counts):
            expected, kept = list[int](), 0
            if kinds[number] is WHOLE:
                expected, kept = chosen[number][-1:], count
            elif kinds[number] is ACCEPTED:
                expected = accept_on_host(tokens[number][1:], chosen[number], stops[number])
                kept = len(expected)
            assert numbers[number] == len(expected)
            assert numbers[first : first + len(expected)] == expected
            if expected:
                seen.add(kept)
                assert torch.equal(known[number], embedding[expected[-1]])
                assert known_tokens[number] == expected[-1]
                lines = (appending.lines[:, number, ROWS.value], proposing.lines[:, number, BASE.value])
                assert [line.tolist() for line in lines] == [[kept] * 2, [bases[number] + kept] * 2]
            if belonging is not None and expected:
                own = belonging[first - len(asked) :][:count].tolist()
                assert own == [number] * kept + [-1] * (count - kept)
            first += count
        assert not any(numbers[len(counts) : len(asked)])
    assert len(seen) > 3


def place(
    many: list[StepParameters], bases: list[int], counts: list[int], tokens: list[list[int]], together: bool
) -> None:
    """Fill in and send where the sessions' rows stand."""
    for parameters in many:
        copies, first = len(parameters.lines), 0
        if together:
            parameters.begin()
        for number, (base, count, own) in enumerate(zip(bases, counts, tokens, strict=True)):
            for copy in range(copies):
                if together:
                    parameters.add(number, first, base, count, copy=copy, token_ids=own)
                else:
                    parameters.fill(base, count, copy=copy, token_ids=own)
            first += count
        parameters.send()
        parameters.record_launch()


@pytest.mark.parametrize("together", [False, True])
def test_blocks_begin_with_the_known_token(together: bool) -> None:
    """A session's first row is its known token's, the others are the mask token's."""
    from shard_worker.model.kernels.block_rows import block_rows
    from shard_worker.model.kernels.step_parameters import StepParameters

    where = device().torch_device
    known, mask = torch.randn(SESSIONS, 1100).to(where), torch.randn(1100).to(where)
    parameters = StepParameters(where, 3, rows=16, sessions=SESSIONS if together else None)
    blocks = [3, 1, 4] if together else [6]
    place([parameters], [9] * len(blocks), blocks, [[]] * len(blocks), together)

    rows = block_rows(known, mask, parameters.places(16), 16)

    first = 0
    for number, count in enumerate(blocks):
        assert torch.equal(rows[first], known[number])
        assert torch.equal(rows[first + 1 : first + count], mask.expand(count - 1, -1))
        first += count
