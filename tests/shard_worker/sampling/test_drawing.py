"""The race that draws tokens: against its definition in Python's integers and doubles, its law, and what moves it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.messages.sampling import SamplingParams
from shard_worker.sampling import drawing
from shard_worker.sampling.drawing import NOT_FINITE, Draw, draw, negated_variates, race_key, token_numbers

CPU = torch.device("cpu")
SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=2),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    SamplingParams(temperature=0.9, min_p=0.05, seed=4),
    SamplingParams(temperature=0.7, top_k=5, seed=5),
    SamplingParams(temperature=2.0, top_k=700, min_p=0.001, top_p=0.999, seed=6),
]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def cumulative(scaled: torch.Tensor) -> np.ndarray:
    """Return the cumulative distribution in token order."""
    return scaled[0].double().softmax(-1).cumsum(-1).numpy()


def splitmix64(index: int) -> int:
    """Return the number at this index of the sequence from state 0, in Python's integers."""
    mask = 2**64 - 1
    state = (index + 1) * 0x9E3779B97F4A7C15 & mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31


def variate(seed: int, position: int, token: int) -> float:
    """Return a token's exponential variate as the documentation defines it."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "little") | 1, int.from_bytes(digest[4:], "little")
    number = splitmix64(token)
    bits = ((number | 1) % 2**32 * first + (number >> 33 << 1) * second) % 2**32
    return -math.log1p(-min(bits, 2**32 - bits) / 2**31)


def test_the_winner_is_the_one_of_the_definition() -> None:
    """The least variate over weight wins, equally the argmax of logits / temperature plus Gumbel variates."""
    logits = random_logits(40, 300)
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        draws = [Draw(SamplingParams(temperature=0.8, seed=seed), position) for position in (*range(39), 2**32)]
        expected = [
            max(range(300), key=lambda token: row[token] / 0.8 - math.log(variate(seed, one.position, token)))
            for one, row in zip(draws, logits.double().tolist(), strict=True)
        ]
        assert draw(logits, draws) == expected


def test_wide_vocabularies_follow_softmax() -> None:
    """Drawn tokens of a vocabulary of some thousand, in cells of about equal probability, by a chi-square test."""
    draws, cells = 20_000, 50
    logits = random_logits(1, 3000, seed=1)
    sampling = SamplingParams(temperature=3.0, seed=11)
    tokens = draw(logits.expand(draws, -1), [Draw(sampling, position) for position in range(draws)])

    probabilities = (logits[0].double() / 3.0).softmax(-1).numpy()
    # Of neighbours among the tokens, so that it also tells whether places in the vocabulary matter.
    cell = np.minimum((np.cumsum(probabilities) * cells).astype(int), cells - 1)
    expected = np.bincount(cell, probabilities, cells) * draws
    observed = np.bincount(cell[tokens], minlength=cells)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    freedom = cells - 1
    assert ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)) < 5


def test_variates_are_exponential_and_unrelated() -> None:
    """Between positions, seeds and tokens; each of them is distributed as it should be."""
    numbers = token_numbers(200, CPU)
    keys = torch.tensor([[race_key(seed, position) for position in range(200)] for seed in range(200)]).int()
    variates = -negated_variates(numbers, keys.view(-1, 2, 1)).view(200, 200, 200)  # seeds, positions, tokens

    assert float(variates.min()) > 0
    ordered = (1 - (-variates.double().flatten()).exp()).sort().values
    # Kolmogorov and Smirnov: exceeded with a chance below 1e-6.
    even = torch.arange(len(ordered)) / len(ordered)
    assert float((ordered - even).abs().max()) < math.sqrt(math.log(2e6) / (2 * len(ordered)))
    for table in (variates[0], variates[:, 0], variates[:, :, 0], variates[7].T):
        # The correlation of 200 pairs lies within ±0.3 with a chance above 0.9999 each.
        neighbours = torch.corrcoef(table).diagonal(1)
        assert float(neighbours.abs().max()) < 0.4
        assert float(neighbours.mean().abs()) < 0.03


def test_noise_in_the_logits_changes_a_token_only_where_two_are_nearly_level() -> None:
    """The winner changes only where the second is within twice the noise over the temperature, which has that chance at
    most. Of 20,000 draws that are 0.3 with a noise of 1e-5, and 33 with 1e-3. By the inverse of the cumulative
    distribution several times as many change."""
    draws, vocabulary, temperature = 20_000, 3000, 1.2
    logits = random_logits(1, vocabulary, seed=2)
    every = [Draw(SamplingParams(temperature=temperature, seed=5), position) for position in range(draws)]
    tokens = np.array(draw(logits.expand(draws, -1), every))
    uniform = np.random.default_rng(0).random(draws)
    inverse = np.searchsorted(cumulative(logits / temperature), uniform)
    for noise, most in ((1e-5, 4), (1e-3, 60)):
        noisy = logits + noise * (2 * torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(3)) - 1)
        moved = np.array(draw(noisy.expand(draws, -1), every))

        changed = np.flatnonzero(tokens != moved)
        assert len(changed) <= most
        for position in changed:
            first, second = (
                float(logits[0, token]) / temperature - math.log(variate(5, int(position), int(token)))
                for token in (tokens[position], moved[position])
            )
            assert 0 <= first - second < 2 * noise / temperature + 1e-5
        assert np.sum(inverse != np.searchsorted(cumulative(noisy / temperature), uniform)) > 3 * len(changed)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_masks_leave_the_draw_as_it_is(sampling: SamplingParams) -> None:
    """A token that wins among all tokens wins among those that top-k, top-p and min-p leave, if it is one of them."""
    logits = random_logits(200, 1000, seed=4)
    plain = SamplingParams(temperature=sampling.temperature, seed=sampling.seed)
    open_race = draw(logits, [Draw(plain, position) for position in range(200)])
    drawn = draw(logits, [Draw(sampling, position) for position in range(200)])
    left = drawing.candidates(logits, [sampling] * 200)
    kept = 0
    for row, (free, token) in enumerate(zip(open_race, drawn, strict=True)):
        possible = left.weights[row] > 0
        tokens = possible.nonzero().flatten() if left.places is None else left.places[row][possible]
        assert token in tokens
        if free in tokens:
            kept += 1
            assert token == free
    assert kept > 20


@pytest.mark.parametrize("vocabulary", [5, 64, 1000, 151_669])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_drawn_as_it_is_alone(vocabulary: int, dtype: torch.dtype) -> None:
    """Rows of several requests with different parameters, ties among their logits included, come out as each alone."""
    logits = random_logits(9, vocabulary, seed=6).to(dtype)
    draws = [Draw(SAMPLINGS[row % len(SAMPLINGS)], 100 + row) for row in range(9)]

    together = draw(logits, draws)

    assert together == [token for row, one in enumerate(draws) for token in draw(logits[row : row + 1], [one])]
    assert together == draw(logits.float(), draws)
    # Two sessions with more rows than are worked on at once of the widest.
    assert drawing.draw_together([(logits[:1], draws[:1]), (logits[1:], draws[1:])]) == [together[:1], together[1:]]
    assert len(set(together)) > 2


def test_a_broken_row_leaves_the_others_theirs() -> None:
    """Rows with a NaN, an infinity or no possible token are marked, whatever the parameters."""
    for sampling in SAMPLINGS:
        logits = random_logits(5, 1000, seed=7)
        draws = [Draw(sampling, position) for position in range(5)]
        whole = draw(logits, draws)
        logits[1, 3], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf

        assert draw(logits, draws) == [whole[0], NOT_FINITE, NOT_FINITE, NOT_FINITE, whole[4]]


def test_forbidden_tokens_are_never_drawn_and_a_lone_one_always_is() -> None:
    """Minus infinity has no share, at any temperature that is accepted."""
    logits = torch.full((400, 130), -math.inf)
    logits[:, 129] = -50.0
    for temperature in (1e-300, 0.01, 1.0, 100.0, 1e300):
        draws = [Draw(SamplingParams(temperature=temperature), position) for position in range(400)]
        assert draw(logits, draws) == [129] * 400
    logits[:, 7] = -50.0
    tokens = draw(logits, [Draw(SamplingParams(temperature=1e300), position) for position in range(400)])
    assert {*tokens} == {7, 129}
    assert 120 < tokens.count(7) < 280


def test_low_temperatures_come_to_the_argmax() -> None:
    """A temperature near 0 draws the most probable token, and draws among those that are equal."""
    logits = random_logits(50, 500, seed=8)
    for temperature in (1e-300, 1e-6):
        draws = [Draw(SamplingParams(temperature=temperature), position) for position in range(50)]
        assert draw(logits, draws) == logits.argmax(-1).tolist()


def test_choices_with_neighbouring_seeds_differ() -> None:
    """The choices of one request have seeds in a row, and answers of their own."""
    logits = random_logits(1, 2000, seed=9).expand(8, -1)
    sampling = SamplingParams(temperature=1.0, seed=40)
    tokens = [
        draw(logits, [Draw(replace(sampling, seed=40 + choice), position) for position in range(8)])
        for choice in range(4)
    ]
    assert all(one != other for index, one in enumerate(tokens) for other in tokens[:index])


@pytest.mark.gpu
def test_gpus_draw_what_cpus_draw() -> None:
    """The integers are the same everywhere; the last bits of functions could only matter where two are level."""
    device = torch.device("cuda")
    numbers = token_numbers(5000, CPU)
    assert torch.equal(token_numbers(5000, device).cpu(), numbers)
    logits = random_logits(600, 5000, seed=10)
    draws = [Draw(SAMPLINGS[row % len(SAMPLINGS)], row) for row in range(600)]

    assert draw(logits.to(device), draws) == draw(logits, draws)
    one_by_one = [draw(logits[row : row + 1].to(device), draws[row : row + 1])[0] for row in range(60)]
    assert one_by_one == draw(logits.to(device), draws)[:60]
