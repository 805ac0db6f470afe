"""Sampling against the enumerated distribution, with and without draft tokens.

The logits are a tiny model's over five tokens, so the joint distribution of three tokens has 125 cells. Draws of one
prefix are made together: for each seed they are what `Sampler.choose` returns, which a test of its own checks.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from shard_worker.sampling.acceptance import accept
from shard_worker.sampling.drawing import Candidates, candidates, race, race_key
from shard_worker.sampling.sampler import Sampler
from tests.combinations import covering
from tests.reference import distribution, target
from tests.shard_worker.tiny import Run, Tiny, load_stage

VOCAB, DEPTH, SEEDS = 5, 3, 40_000
PROMPT = (1, 2, 3)
CPU = torch.device("cpu")
NextLogits = Callable[[tuple[int, ...]], torch.Tensor]
Script = Callable[[int, Sequence[int]], tuple[int, ...]]
"""Returns draft tokens after the prompt's last token, from a seed and its true tokens."""

SETTINGS = {
    "plain": distribution.Settings(),
    "cold": distribution.Settings(temperature=0.6),
    "top-k": distribution.Settings(temperature=1.3, top_k=3),
    "top-p": distribution.Settings(temperature=1.3, top_p=0.8),
    "min-p": distribution.Settings(temperature=1.3, min_p=0.2),
    "penalties": distribution.Settings(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "negative penalties": distribution.Settings(repetition_penalty=0.7, presence_penalty=-0.5, frequency_penalty=-0.3),
    "bias": distribution.Settings(logit_bias={0: 1.5, 3: -2.0}),
    "everything": distribution.Settings(0.9, 4, 0.95, 0.05, 1.2, 0.3, 0.2, {2: 0.7}),
}


def request(settings: distribution.Settings, seed: int = 0) -> SamplingParams:
    """Return the same settings as a request carries them: None switches a processor off."""
    off = distribution.Settings()
    values = {
        name: getattr(settings, name)
        for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        if getattr(settings, name) != getattr(off, name)
    }
    return SamplingParams(logit_bias=settings.logit_bias, temperature=settings.temperature, seed=seed, **values)


@pytest.fixture(scope="module")
def next_logits(tiny: Tiny) -> NextLogits:
    """Returns the engine's logits [1, vocab] after a prefix."""
    stage = load_stage(tiny.path("vocab-5"))
    return functools.cache(lambda prefix: Run([stage])(prefix)[-1:])


@functools.cache
def joint_distribution(tiny: Tiny, name: str) -> np.ndarray:
    """Return the distribution of the first tokens, from transformers' logits."""
    model = tiny.model("vocab-5")
    return distribution.joint(lambda ids: target.logits(model, ids)[-1], PROMPT, DEPTH, SETTINGS[name])


def sampler_after(sampling: SamplingParams, prefix: tuple[int, ...]) -> Sampler:
    """Return a sampler that has seen all of a prefix but its last token."""
    sampler = Sampler(sampling, len(PROMPT), VOCAB, CPU)
    sampler.observe(prefix[:-1], 0)
    return sampler


def shares(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return each token's weight in the race behind each row: [n, vocab], not normalised."""
    found = candidates(logits, [sampling] * len(logits))
    return found.weights if found.places is None else torch.zeros_like(logits).scatter(-1, found.places, found.weights)


key_of = functools.cache(race_key)


def raced(weights: torch.Tensor, keys: list[tuple[int, int]]) -> list[int]:
    tokens: list[int] = race(Candidates(weights), VOCAB, keys).tolist()
    return tokens


def continue_plainly(
    sampling: SamplingParams, next_logits: NextLogits, begun: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Draw for every seed, one step a token, until each has DEPTH tokens; `begun` holds what each has already."""
    drawn = list(begun)
    for depth in range(DEPTH):
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for seed, tokens in enumerate(drawn):
            if len(tokens) == depth:
                groups[tokens].append(seed)
        for tokens, seeds in groups.items():
            prefix = (*PROMPT, *tokens)
            logits = sampler_after(sampling, prefix).adjusted(next_logits(prefix), prefix[-1:], len(prefix) - 1)
            weights = shares(logits, sampling).expand(len(seeds), -1)
            chosen = raced(weights, [key_of(seed, len(prefix)) for seed in seeds])
            for seed, token in zip(seeds, chosen, strict=True):
                drawn[seed] = (*tokens, token)
    return drawn


def draw_with_draft_tokens(
    sampling: SamplingParams, next_logits: NextLogits, truth: list[tuple[int, ...]], script: Script
) -> tuple[list[tuple[int, ...]], float]:
    """Return what every seed draws in one verify of the script's draft tokens and plain steps behind it, and the mean
    number of tokens a verify."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for seed in range(len(truth)):
        groups[script(seed, truth[seed])].append(seed)
    begun: list[tuple[int, ...]] = [()] * len(truth)
    for draft_tokens, seeds in groups.items():
        rows = (PROMPT[-1], *draft_tokens)
        known = [(*PROMPT, *draft_tokens[:count]) for count in range(len(rows))]
        logits = torch.cat([next_logits(prefix) for prefix in known])
        adjusted = sampler_after(sampling, PROMPT).adjusted(logits, rows, len(PROMPT) - 1)
        weights = shares(adjusted, sampling).repeat(len(seeds), 1)
        chosen = raced(weights, [key_of(seed, len(PROMPT) + row) for seed in seeds for row in range(len(rows))])
        for index, seed in enumerate(seeds):
            own = chosen[index * len(rows) : (index + 1) * len(rows)]
            begun[seed] = tuple(accept(draft_tokens, own, frozenset()))
    mean = sum(map(len, begun)) / len(begun)
    return continue_plainly(sampling, next_logits, [tokens[:DEPTH] for tokens in begun]), mean


@functools.cache
def plain(next_logits: NextLogits, name: str) -> list[tuple[int, ...]]:
    return continue_plainly(request(SETTINGS[name]), next_logits, [()] * SEEDS)


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_draws_follow_the_enumerated_distribution(tiny: Tiny, next_logits: NextLogits, name: str) -> None:
    """Over many seeds the first three tokens follow the request's distribution and never fall outside of it."""
    joint = joint_distribution(tiny, name)
    observed = distribution.empirical(plain(next_logits, name), VOCAB, DEPTH)

    assert not observed[joint == 0].any()
    assert distribution.total_variation(observed, joint) < distribution.sampling_bound(int((joint > 0).sum()), SEEDS)


def wrong(_seed: int, truth: Sequence[int]) -> tuple[int, ...]:
    return ((truth[0] + 1) % VOCAB, (truth[1] + 2) % VOCAB)


def right(_seed: int, truth: Sequence[int]) -> tuple[int, ...]:
    return tuple(truth[:2])


def right_then_wrong(_seed: int, truth: Sequence[int]) -> tuple[int, ...]:
    return (truth[0], (truth[1] + 3) % VOCAB)


def unrelated(seed: int, _truth: Sequence[int]) -> tuple[int, ...]:
    return ((seed * 7 + 3) % VOCAB, (seed // 5) % VOCAB)


@pytest.mark.parametrize(
    ("script", "fewest", "most", "name"),
    covering(
        (
            (*script, name)
            for name in ("everything", "plain", "top-p")
            for script in ((unrelated, 1.1, 1.6), (right_then_wrong, 2.0, 2.0), (wrong, 1.0, 1.0), (right, 3.0, 3.0))
        ),
        1,
    ),
)
def test_draft_tokens_change_no_token(
    next_logits: NextLogits, name: str, script: Script, fewest: float, most: float
) -> None:
    """With one seed, always wrong, always right and unrelated draft tokens give the tokens of the plain run."""
    truth = plain(next_logits, name)

    speculated, mean = draw_with_draft_tokens(request(SETTINGS[name]), next_logits, truth, script)

    assert speculated == truth
    assert fewest <= mean <= most


@pytest.mark.parametrize("name", ["plain", "top-k", "penalties", "everything"])
def test_proposing_the_argmax_keeps_the_distribution(tiny: Tiny, next_logits: NextLogits, name: str) -> None:
    """A draft that proposes the target's own argmax, as a good one does, keeps the enumerated distribution."""
    argmax: list[int] = []
    for _ in range(2):
        argmax.append(int(next_logits((*PROMPT, *argmax)).argmax()))

    sampling = request(SETTINGS[name])
    truth = plain(next_logits, name)
    speculated, mean = draw_with_draft_tokens(sampling, next_logits, truth, lambda _seed, _truth: tuple(argmax))

    joint = joint_distribution(tiny, name)
    observed = distribution.empirical(speculated, VOCAB, DEPTH)
    assert mean > 1.3
    assert distribution.total_variation(observed, joint) < distribution.sampling_bound(int((joint > 0).sum()), SEEDS)


@pytest.mark.parametrize("name", SETTINGS)
def test_choose_draws_what_the_grouped_draws_are(next_logits: NextLogits, name: str) -> None:
    """`choose`, one seed and step at a time and with the rows of a verify, returns the tokens of the grouped draws."""
    truth = plain(next_logits, name)
    for seed in range(40):
        sampling = replace(request(SETTINGS[name]), seed=seed)
        produced: list[int] = []
        sampler = Sampler(sampling, len(PROMPT), VOCAB, CPU)
        sampler.observe(PROMPT[:-1], 0)
        while len(produced) < DEPTH:
            prefix = (*PROMPT, *produced)
            produced += sampler.choose(next_logits(prefix), prefix[-1:], len(prefix) - 1)
            sampler.observe(prefix[-1:], len(prefix) - 1)
        assert tuple(produced) == truth[seed]

        verified = sampler_after(sampling, PROMPT)
        rows = (PROMPT[-1], *produced[:2])
        logits = torch.cat([next_logits((*PROMPT, *produced[:count])) for count in range(3)])
        assert verified.choose(logits, rows, len(PROMPT) - 1) == produced


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("prompt_length", [0, 3, 4, 9])
def test_the_distribution_of_every_row_includes_the_draft_tokens_before_it(name: str, prompt_length: int) -> None:
    """Row by row, bias, penalties and truncation give exactly the distribution of the prefix that ends with the row."""
    settings = SETTINGS[name]
    sampling = request(settings)
    history, rows = [1, 2, 2, 0, 3, 1], [2, 2, 4]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    sampler = Sampler(sampling, prompt_length, VOCAB, CPU)
    # Committed in two pieces, of which either may hold the end of the prompt.
    sampler.observe(history[:4], 0)
    sampler.observe(history[4:], 4)

    weights = shares(sampler.adjusted(logits, rows, len(history)), sampling)

    for row in range(3):
        seen = [*history, *rows[: row + 1]]
        expected = distribution.next_token(logits[row], seen[:prompt_length], seen[prompt_length:], settings)
        own = weights[row] / weights[row].sum()
        np.testing.assert_allclose(own.numpy(), expected, atol=1e-6)


def test_only_the_last_row_of_a_longer_step_is_chosen_from() -> None:
    """A step of several rows whose last one alone has logits counts the others as history."""
    sampling = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    whole = Sampler(sampling, 2, VOCAB, CPU)
    parts = Sampler(sampling, 2, VOCAB, CPU)
    parts.observe([4, 4, 1], 0)

    assert torch.equal(whole.adjusted(logits, [4, 4, 1, 2], 0), parts.adjusted(logits, [2], 3))


def test_greedy_is_the_argmax_after_bias_and_penalties() -> None:
    """Temperature 0 takes the best adjusted logit, the first of equal ones, and no random number."""
    logits = torch.tensor([[0.0, 3.0, 2.9, 1.0, 3.0]])

    assert Sampler(SamplingParams(), 1, VOCAB, CPU).choose(logits, [0], 0) == [1]
    assert Sampler(SamplingParams(logit_bias={2: 0.2}), 1, VOCAB, CPU).choose(logits, [0], 0) == [2]
    penalised = Sampler(SamplingParams(presence_penalty=0.05, repetition_penalty=1.5), 0, VOCAB, CPU)
    penalised.observe([1], 0)
    assert penalised.choose(logits, [4], 1) == [2]
    assert [Sampler(SamplingParams(seed=seed), 1, VOCAB, CPU).choose(logits, [0], 0) for seed in range(9)] == [[1]] * 9


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    """A broken model yields an error and never a token that doesn't exist."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5, 1.5], [0.0, bad, 2.0, 0.5, 1.5]])

    for sampling in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1)):
        with pytest.raises(InvalidArgument, match="not finite"):
            Sampler(sampling, 0, VOCAB, CPU).choose(logits, [1, 2], 0)


def test_processors_never_leave_nothing() -> None:
    """However strict, top-p and min-p keep the most probable token and top-k keeps those that tie with the k-th."""
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0, -1.0]])

    for sampling in (SamplingParams(temperature=1.0, top_p=1e-9), SamplingParams(temperature=1.0, min_p=1.0)):
        assert (shares(logits, sampling) > 0).sum() in (1, 2)
    tied = shares(logits, SamplingParams(temperature=1.0, top_k=1))
    assert tied.nonzero()[:, 1].tolist() == [1, 3]
    beyond = shares(logits, SamplingParams(temperature=1.0, top_k=50))
    assert (beyond > 0).all()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("prompt_length", [0, 3, 6])
def test_a_row_without_tokens_follows_all_that_was_observed(name: str, prompt_length: int) -> None:
    """Logits that are there already give the token that a step of the last token gives, at the same position."""
    history = [1, 4, 1, 3, 0, 1]
    for seed in range(40):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        stepping, resuming = (Sampler(request(SETTINGS[name], seed), prompt_length, VOCAB, CPU) for _ in range(2))
        stepping.observe(history[:-1], 0)
        resuming.observe(history, 0)

        resumed = resuming.choose(logits, (), len(history))

        assert resumed == stepping.choose(logits, history[-1:], len(history) - 1)
        # Choosing counts nothing.
        assert resumed == resuming.choose(logits, (), len(history))
