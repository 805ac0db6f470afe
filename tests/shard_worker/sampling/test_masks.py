"""Forbidden tokens: the same ones whatever the steps, against a rule that is written out for one row at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from shard_worker.sampling.acceptance import accept
from shard_worker.sampling.sampler import Sampler

VOCAB, CPU = 6, torch.device("cpu")
STOPS = frozenset({0})
PROMPT = (1, 2, 3)


def forbidden(sampling: SamplingParams, outputs: Sequence[int]) -> set[int]:
    """What may not follow these output tokens."""
    found = {last for *before, last in sampling.bad_token_sequences if outputs[len(outputs) - len(before) :] == before}
    if sampling.allowed_token_ids:
        found |= set(range(VOCAB)) - set(sampling.allowed_token_ids)
    return found | (STOPS if len(outputs) < (sampling.min_tokens or 0) else set())


def written_out(sampling: SamplingParams, logits: torch.Tensor, length: int) -> list[int]:
    """The greedy answer, row by row; `logits` are those after each position."""
    outputs: list[int] = []
    while len(outputs) < length and not (outputs and outputs[-1] in STOPS):
        row = logits[len(PROMPT) + len(outputs) - 1].clone()
        row[list(forbidden(sampling, outputs))] = float("-inf")
        outputs.append(int(row.argmax()))
    return outputs


def in_blocks(sampling: SamplingParams, logits: torch.Tensor, length: int, rng: random.Random) -> list[int]:
    """The same with a draft that guesses well and badly."""
    sampler = Sampler(sampling, len(PROMPT), VOCAB, CPU, None, STOPS)
    sampler.observe(PROMPT[:-1], 0)
    tokens, outputs = [*PROMPT], list[int]()
    while len(outputs) < length and not (outputs and outputs[-1] in STOPS):
        guess = written_out(sampling, logits, length)[len(outputs) : len(outputs) + rng.randint(0, 4)]
        draft = [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in guess]
        at = len(tokens) - 1
        step = [tokens[-1], *draft]
        rows = logits[at : at + len(step)]
        chosen = rows.argmax(-1).tolist() if sampler.is_greedy else sampler.choose(rows, step, at)
        produced = accept(draft, chosen, STOPS)
        sampler.observe(step[: len(produced)], at)
        tokens += produced
        outputs += produced
    return outputs[:length]


def test_drafts_change_nothing() -> None:
    """Blocks of any length give the answer of single rows, and it heeds every rule."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    heeded = 0
    for _ in range(150):
        sampling = SamplingParams(
            min_tokens=rng.choice([None, 3, 9]),
            allowed_token_ids=tuple(rng.choice([(), (0, 2, 4, 5)])),
            bad_token_sequences=tuple(
                tuple(rng.choices(range(1, VOCAB), k=rng.randint(1, 3))) for _ in range(rng.randint(0, 3))
            ),
        )
        if forbidden(sampling, []) | STOPS >= set(range(VOCAB)):
            continue
        logits = torch.randn(len(PROMPT) + 14, VOCAB, generator=generator)
        expected = written_out(sampling, logits, 12)
        if any(forbidden(sampling, expected[:end]) >= set(range(VOCAB)) for end in range(len(expected))):
            continue
        assert in_blocks(sampling, logits, 12, rng) == expected
        heeded += expected != written_out(SamplingParams(), logits, 12)
    assert heeded > 60


def test_what_no_longer_forbids_leaves_the_fast_way() -> None:
    """Once min_tokens are there, the argmax is enough again."""
    sampler = Sampler(SamplingParams(min_tokens=2), len(PROMPT), VOCAB, CPU, None, STOPS)
    sampler.observe([*PROMPT, 4], 0)
    assert not sampler.is_greedy
    sampler.observe([4], 4)
    assert sampler.is_greedy


def test_nothing_left_is_refused_and_an_end_may_come_early() -> None:
    """A row without a token says which fields are at fault; min_tokens yields where only the end is left."""
    logits = torch.zeros(1, VOCAB)
    nothing = Sampler(
        SamplingParams(allowed_token_ids=(1,), bad_token_sequences=((1,),)), len(PROMPT), VOCAB, CPU, None, STOPS
    )
    with pytest.raises(InvalidArgument, match="allowed_token_ids, bad_words and the grammar leave none"):
        nothing.choose(logits, [3], 2)
    only_end = Sampler(SamplingParams(allowed_token_ids=(0,), min_tokens=5), len(PROMPT), VOCAB, CPU, None, STOPS)
    assert only_end.choose(logits, [3], 2) == [0]
