"""The promise, family by family: in float32 the tokens of every cut into two stages are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from coordinator.prefix.cache import PrefixCache, lineage_of
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.stores import open_store
from services.model.checkpoint_files import read_config
from services.model.families import read_model_config
from tests.reference import target
from tests.shard_worker.tiny import Tiny

FAMILIES = (
    "llama",
    "mistral-sliding",
    "qwen3-sliding",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "gpt_oss-mxfp4",
    "gemma3",
    "gemma4",
    "gemma4-experts",
    "gemma4-inputs",
    "glm4_moe",
    "laguna",
)
TOKENS = 64
DRAFT_KINDS = ("sliding_attention", "full_attention")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Tiny checkpoints, each written on first use."""
    return Tiny(tmp_path_factory.mktemp("families"))


Case = tuple[list[int], list[int]]
"""A prompt, and what transformers says behind it."""


async def answers_of(
    path: Path, draft: Path, cases: Sequence[Case], cut: int, *, speculate: bool, store: str | None = None
) -> list[Answer]:
    """Answer all prompts at once, over two workers in float32. store: where prefixes are kept; None to keep none."""
    layers = read_model_config(read_config(path)).num_layers
    plan = make_plan(
        target_devices="cpu,cpu",
        layer_split=f"{cut},{layers - cut}",
        draft_device=None,
        num_layers=layers,
        has_draft=True,
    )
    async with Cluster(plan, Checkpoints(path, draft, "float32")) as cluster:
        lineage = lineage_of(cluster, "text", with_draft=True)
        disk = None
        if store is not None:
            disk = DiskCache(open_store(store), [lineage], layers, path.name, budget_bytes=1 << 30, min_tokens=16)
        async with PrefixCache(cluster, "text", disk=disk) as cache:
            requests = [
                Request(f"r{number}", tuple(prompt), len(tokens), speculate=speculate, prefill_chunk=16)
                for number, (prompt, tokens) in enumerate(cases)
            ]
            kept = cache if store is not None else None
            return [*await asyncio.gather(*(generate(cluster, one, None, prefixes=kept) for one in requests))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_prompts_at_every_cut(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """20 prompts asked at once, so that their rows stand in batches: plain, with a random DFlash draft, and from
    prefixes that were kept at another cut."""
    model = target.load(tiny.path(name))
    layers = model.config.get_text_config().num_hidden_layers
    # The longest of their prompts are worth to be kept.
    cases = [target.clear_prompt(model, 3 + 4 * seed, TOKENS, seed=100 * seed) for seed in range(20)]
    draft = tiny.draft(name, target_layer_ids=(0, layers - 1))

    async def run() -> None:
        store = str(tmp_path / "prefixes")
        for cut in range(1, layers):
            runs = [
                await answers_of(tiny.path(name), draft, cases, cut, speculate=speculate) for speculate in (False, True)
            ]
            assert sum(answer.stats.draft_tokens for answer in runs[1]) > 0
            runs.append(await answers_of(tiny.path(name), draft, cases, cut, speculate=True, store=store))
            if cut > 1:
                assert sum(answer.stats.cached_tokens for answer in runs[-1]) > 100
            for found in runs:
                for answer, (_, tokens) in zip(found, cases, strict=True):
                    assert list(answer.token_ids) == tokens

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("gemma4-sharing", marks=pytest.mark.slow)])
def test_answers_far_behind_their_windows(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Sliding layers have given back what they saw of the prompt, the draft's too: plain, drafted, and from a prefix
    that was kept at another cut."""
    model = target.load(tiny.path(name))
    cases = [target.clear_prompt(model, length, 40, seed=length) for length in (540, 600)]
    draft = tiny.draft(name, "sliding", target_layer_ids=(0, 2), layer_types=DRAFT_KINDS, sliding_window=10)
    store = str(tmp_path / "prefixes")

    async def run() -> None:
        runs = [
            await answers_of(tiny.path(name), draft, cases, 1, speculate=False),
            await answers_of(tiny.path(name), draft, cases, 1, speculate=True, store=store),
            await answers_of(tiny.path(name), draft, cases, 2, speculate=True, store=store),
        ]
        assert [answer.stats.cached_tokens for answer in runs[2]] == [540, 600]
        for found in runs:
            for answer, (_, tokens) in zip(found, cases, strict=True):
                assert list(answer.token_ids) == tokens

    asyncio.run(run())
