"""Sampled answers of a whole chain (stages, draft and acceptance) follow the enumerated distribution, however draft
tokens are chosen."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.engine.prompt_lookup import PromptLookup
from services.messages.sampling import SamplingParams
from tests.combinations import others_slow
from tests.reference import checkpoints, distribution, target
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.chain import Answer, Chain

VOCAB, DEPTH, DRAWS = 5, 3, 1000
FEWER_DRAWS = 300
"""Of each way of choosing draft tokens, all of which are judged by one way of accepting them."""
PROMPT = (1, 3, 0)
REPEATED = (1, 3, 0, 2, 1, 3, 0)
"""A prompt in whose end draft tokens are found by looking them up."""

CHOOSERS: dict[str, dict[str, Any]] = {
    "reduced": {"form": "speculators", "token_ids": (0, 1, 2)},
    "dflash2": {"own": DFLASH2 | {"selector_top_k": 3}},
    "dspark": {"own": DSPARK},
    "dspark-gated": {"own": DSPARK | {"markov_head_type": "gated"}},
    "dspark-rnn": {"own": DSPARK | {"markov_head_type": "rnn"}},
    "dspark-confident": {"own": DSPARK | {"enable_confidence_head": True}},
    "domino": {"own": DOMINO},
}
"""Drafts of which each chooses tokens in a way of its own, beside the most probable one of each row."""
SETTINGS = {
    "temperature": (distribution.Settings(temperature=1.3), SamplingParams(temperature=1.3)),
    "all": (
        distribution.Settings(
            temperature=0.9, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3
        ),
        SamplingParams(temperature=0.9, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3),
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with five tokens, and a draft for it whose draft tokens are now right and now wrong."""
    root = tmp_path_factory.mktemp("five")
    model = checkpoints.write_qwen3(root / "target", vocab=VOCAB, layers=2, logit_scale=1.5)
    draft = checkpoints.write_draft(
        root / "draft", model, layers=1, block_size=4, target_layer_ids=(0, 1), mask_token_id=4
    )
    return model, draft


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> dict[tuple[int, ...], distribution.Array]:
    """The joint distributions of the first tokens by prompt, at the temperature of the first of SETTINGS."""
    reference, (settings, _) = target.load(pair[0]), SETTINGS["temperature"]
    return {
        prompt: distribution.joint(
            lambda ids: target.logits(reference, ids)[-1].double().numpy(), list(prompt), DEPTH, settings
        )
        for prompt in (PROMPT, REPEATED)
    }


@pytest.mark.parametrize(
    ("cuts", "drafted", "setting"),
    others_slow(product([(), (1,)], [False, True], SETTINGS), [((1,), True, "all")]),
)
async def test_first_three_tokens_follow_the_enumerated_distribution(
    pair: tuple[Path, Path], cuts: tuple[int, ...], drafted: bool, setting: str
) -> None:
    """One stage or two, with and without a draft: within sampling error of transformers' distribution."""
    model, draft = pair
    reference = target.load(model)
    enumerated, asked = SETTINGS[setting]
    expected = distribution.joint(
        lambda ids: target.logits(reference, ids)[-1].double().numpy(), list(PROMPT), DEPTH, enumerated
    )
    chain = Chain(model, cuts, draft=draft if drafted else None)
    samples, accepted = [], 0
    for seed in range(DRAWS):
        sampling = SamplingParams(**{name: getattr(asked, name) for name in asked.__slots__} | {"seed": seed})
        async with chain.session(sampling=sampling, prompt_length=len(PROMPT), max_length=16, max_rows=8) as client:
            if drafted:
                answer = await client.speculate(PROMPT, DEPTH, draft_tokens=3)
                accepted += sum(len(tokens) - 1 for tokens in answer.verified)
                samples.append(answer.tokens[:DEPTH])
            else:
                samples.append(await client.plain(PROMPT, DEPTH))
    chain.shutdown()
    assert_follows(samples, expected)
    assert not drafted or accepted > DRAWS / 20


# Whatever chooses them, one way of accepting them is tested; sessions with each are tested for their tokens by default.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "dflash2" else pytest.mark.slow) for name in CHOOSERS]
)
async def test_each_way_of_choosing_draft_tokens_leaves_the_distribution(
    pair: tuple[Path, Path], expected: dict[tuple[int, ...], distribution.Array], tmp_path: Path, name: str
) -> None:
    """Some draft tokens are accepted and some are not, and the answers are those of the target alone. A reduced
    vocabulary proposes no token that it lacks, and answers have these tokens all the same."""
    shape = {"layers": 1, "block_size": 4, "target_layer_ids": (0, 1), "mask_token_id": 4}
    draft = checkpoints.write_draft(tmp_path / "draft", pair[0], **(shape | CHOOSERS[name]))
    chain = Chain(pair[0], draft=draft)
    answers = []
    for seed in range(FEWER_DRAWS):
        sampling = SamplingParams(temperature=1.3, seed=seed)
        async with chain.session(sampling=sampling, prompt_length=len(PROMPT), max_length=16, max_rows=8) as client:
            answers.append(await client.speculate(PROMPT, DEPTH, draft_tokens=3))
    chain.shutdown()

    assert_follows([answer.tokens for answer in answers], expected[PROMPT])
    assert_some_accepted(answers)
    proposed = {token for answer in answers for proposal in answer.proposals for token in proposal}
    assert proposed <= {*CHOOSERS[name].get("token_ids", range(VOCAB))}
    assert {token for answer in answers for token in answer.tokens} == {*range(VOCAB)}


@pytest.mark.slow
async def test_draft_tokens_that_are_looked_up_leave_the_distribution(
    pair: tuple[Path, Path], expected: dict[tuple[int, ...], distribution.Array]
) -> None:
    """As those of a draft model."""
    chain = Chain(pair[0])
    answers = []
    for seed in range(FEWER_DRAWS):
        lookup = PromptLookup()
        lookup.read(REPEATED)

        def looked_up(tokens: list[int], lookup: PromptLookup = lookup) -> tuple[int, ...]:
            lookup.follow(tokens[len(lookup) - len(REPEATED) :])
            # Where nothing is found the last token is as good as any.
            return lookup.draft_tokens(3) or (tokens[-1],)

        sampling = SamplingParams(temperature=1.3, seed=seed)
        async with chain.session(sampling=sampling, prompt_length=len(REPEATED), max_length=16, max_rows=8) as client:
            answers.append(await client.speculate(REPEATED, DEPTH, script=looked_up))
    chain.shutdown()

    assert_follows([answer.tokens for answer in answers], expected[REPEATED])
    assert_some_accepted(answers)


def assert_follows(samples: list[list[int]], expected: distribution.Array) -> None:
    """Assert that the first tokens are drawn from the joint distribution, within sampling error."""
    for depth in range(1, DEPTH + 1):
        # The first tokens alone have fewer cells, and so a sharper bound.
        marginal = expected.reshape(VOCAB**depth, -1).sum(1)
        found = distribution.empirical([tokens[:depth] for tokens in samples], VOCAB, depth)
        cells = int(np.count_nonzero(marginal))
        assert distribution.total_variation(found, marginal) < distribution.sampling_bound(cells, len(samples)), depth


def assert_some_accepted(answers: list[Answer]) -> None:
    """Assert that draft tokens were both accepted and refused often enough to tell wrong ways of either."""
    accepted = sum(len(tokens) - 1 for answer in answers for tokens in answer.verified)
    refused = sum(len(answer.verified) for answer in answers) - accepted
    assert min(accepted, refused) > len(answers) / 20
