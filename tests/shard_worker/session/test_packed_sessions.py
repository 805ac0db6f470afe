"""Sessions over packed checkpoints: tokens are those of the dense one that is stood for, however they come about."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.messages.description import HeadPlace
from tests.reference import packed_checkpoints, target
from tests.shard_worker.chain import BLOCK, Chain
from tests.shard_worker.packed import CASES, Packed
from tests.shard_worker.tiny import Tiny

COUNT = 20


@pytest.fixture(scope="module")
def draft(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose matrices are packed, `fc` among them."""
    source = tiny.draft("qwen3_5-ratio-2", "packed", target_layer_ids=(2, 0, 3))
    case = CASES["ct-4-zeros"]
    settings = case.settings | {"ignore": []}
    path, _ = packed_checkpoints.write_packed(
        source,
        tmp_path_factory.mktemp("draft"),
        settings,
        case.pack,
        lambda name: name == "fc.weight" or packed_checkpoints.is_projection(name),
    )
    return path


@pytest.mark.parametrize(
    ("name", "cuts", "place"),
    [
        ("fp8-ends", (), HeadPlace.SHARED),
        ("fp8-ends", (2,), HeadPlace.LOADED),
        ("gptq-act", (1, 3), HeadPlace.SHARED),
        ("ct-nvfp4", (2,), HeadPlace.PROJECTED),
    ],
)
async def test_tokens_are_those_of_transformers(
    packed: Packed, draft: Path, name: str, cuts: tuple[int, ...], place: HeadPlace
) -> None:
    """Plain, with a draft that is packed too, and behind a kept prefix, in one stage and in several."""
    path, dense = packed(name, "qwen3_5-ratio-2")
    prompt, expected = target.clear_prompt(target.load(dense), 12, COUNT)
    chain = Chain(path, cuts, draft=draft, place=place)
    try:
        async with chain.session() as client:
            await client.prefill(prompt[:-1])
            await client.save("kept")
        async with chain.session() as client:
            await client.restore("kept", prompt[:-1])
            assert await client.plain(prompt[-1:], COUNT) == expected
        async with chain.session() as client:
            await client.restore("kept", prompt[:-1])
            answer = await client.speculate(prompt[-1:], COUNT)
        async with chain.session() as client:
            missed = await client.speculate(prompt, COUNT)
    finally:
        chain.shutdown()
    assert answer == missed
    assert answer.tokens == expected
    assert all(len(proposal) == BLOCK - 1 for proposal in answer.proposals)
