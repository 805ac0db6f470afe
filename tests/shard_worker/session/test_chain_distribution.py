"""Sampled answers of a whole chain (stages, draft and acceptance) follow the enumerated distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.messages.sampling import SamplingParams
from tests.reference import checkpoints, distribution, target
from tests.shard_worker.chain import Chain

VOCAB, DEPTH, DRAWS = 5, 3, 1000
PROMPT = (1, 3, 0)
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("cuts", "drafted"), [((), False), ((), True), ((1,), False), ((1,), True)])
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

    for depth in range(1, DEPTH + 1):
        # The first tokens alone have fewer cells, and so a sharper bound.
        marginal = expected.reshape(VOCAB**depth, -1).sum(1)
        found = distribution.empirical([tokens[:depth] for tokens in samples], VOCAB, depth)
        cells = int(np.count_nonzero(marginal))
        assert distribution.total_variation(found, marginal) < distribution.sampling_bound(cells, DRAWS), depth
    assert not drafted or accepted > DRAWS / 20
