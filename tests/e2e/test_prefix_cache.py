"""Prefixes taken up from memory and from disk, in real processes: the tokens and the speculation of a cold run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.text.model_files import read_model_files
from coordinator.text.prompt import chat_prompt
from services.messages.sampling import SamplingParams
from tests.e2e.conftest import ROOT, Pair, Worker, when_idle
from tests.e2e.prefix_client import GREEDY, TOKENS, Client, client
from tests.reference import checkpoints

DEMO = ROOT / "deploy" / "demo"
SEEDED = SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, seed=11)


PLACEMENTS = [("cpu", None, None), ("cpu,cpu", "0.3,0.7", None), ("cpu,cpu,cpu", None, "cpu")]
"""The hybrid has attention as well: the other family is left to long runs."""


@pytest.mark.parametrize(
    ("family", "devices", "split", "draft_device", "every"),
    [
        ("qwen3_5", *PLACEMENTS[1], False),
        *(
            pytest.param(family, *place, True, marks=pytest.mark.slow)
            for place in PLACEMENTS
            for family in ("qwen3", "qwen3_5")
        ),
    ],
)
async def test_taken_up_from_memory(
    family: str,
    devices: str,
    split: str | None,
    draft_device: str | None,
    every: bool,
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """The same prompt, one token more, a shorter one, another suffix, the answer's continuation: as if never seen."""
    prompt, greedy = prefix_cases[family]
    (other,) = checkpoints.random_prompts(256, 1, 77, [20])
    async with client(pairs[family], devices, split, draft_device=draft_device) as one:
        first = await one.ask(prompt)
        assert first.token_ids == greedy
        assert first.stats.cached_tokens == 0
        await one.settle()
        variants = {
            "equal": prompt,
            "longer": (*prompt, 5),
            "shorter": prompt[:45],
            "suffix": (*prompt[:48], *other),
            "continued": (*prompt, *greedy[:-1], 9, 8, 7),
        }
        # By default seeds are left to one variant, that of which most is computed.
        seeded = [(True, SEEDED)] if every else []
        for name, variant in variants.items():
            plainly = [(True, SEEDED), (False, SEEDED)] if name == "suffix" else seeded
            for speculate, sampling in [(True, GREEDY), *plainly]:
                way: Any = {"sampling": sampling, "speculate": speculate, "tokens": TOKENS if every else 16}
                cold = await one.ask(variant, **way, cached=False)
                warm = await one.ask(variant, **way)
                await one.settle()
                again = await one.ask(variant, **way)
                assert warm.token_ids == cold.token_ids
                assert again.token_ids == cold.token_ids
                # By now its own end is kept, if it wasn't before.
                assert again.stats.cached_tokens == len(variant), name
                assert again.stats.cache_source == "memory"
                if sampling == GREEDY:
                    # Attention's state can be cut anywhere, recurrent state only taken up where it was kept.
                    least = {"shorter": 44, "continued": len(variant) - 3}.get(name, 48) if family == "qwen3" else 24
                    assert warm.stats.cached_tokens >= least, name
        await one.settle()
        for address in one.cluster.addresses:
            worker = await when_idle(one.cluster, address)
            assert 0 < worker.snapshot_bytes <= worker.snapshot_budget_bytes


@pytest.mark.parametrize(
    ("family", "places"),
    [
        pytest.param("qwen3_5", [PLACEMENTS[0], PLACEMENTS[2]], id="some"),
        pytest.param("qwen3_5", [PLACEMENTS[1], ("cpu,cpu", "0.8,0.2", None)], id="more", marks=pytest.mark.slow),
        pytest.param("qwen3", [*PLACEMENTS, ("cpu,cpu", "0.8,0.2", None)], id="qwen3", marks=pytest.mark.slow),
    ],
)
async def test_restart_on_another_split(
    family: str,
    places: list[tuple[str, str | None, str | None]],
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    """Kept on two workers; taken up by new processes: one worker, three with the draft apart, two cut elsewhere."""
    prompt, greedy = prefix_cases[family]
    async with client(pairs[family], "cpu,cpu", "0.3,0.7", store=tmp_path) as one:
        first = await one.ask(prompt)
        seeded = await one.ask(prompt, sampling=SEEDED, cached=False)
        assert first.token_ids == greedy
    for devices, split, draft_device in places:
        async with client(pairs[family], devices, split, draft_device=draft_device, store=tmp_path) as one:
            found = await one.ask(prompt)
            assert found.token_ids == first.token_ids
            assert found.stats.cache_source == "disk"
            assert found.stats.cached_tokens >= 48
            assert found.stats.restore_ms > 0
            again = await one.ask(prompt, sampling=SEEDED)
            assert again.token_ids == seeded.token_ids
            assert again.stats.cache_source == "memory"


async def test_draft_decides_what_fits(
    pairs: dict[str, Pair], prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], tmp_path: Path
) -> None:
    """A state without the draft's part is not taken up for speculation, nor by another dtype or model."""
    prompt, greedy = prefix_cases["qwen3_5"]
    async with client(pairs["qwen3_5"], "cpu", store=tmp_path, has_draft=False) as one:
        await one.ask(prompt)
    async with client(pairs["qwen3_5"], "cpu", store=tmp_path) as one:
        found = await one.ask(prompt)
        assert found.stats.cached_tokens == 0
        assert found.token_ids == greedy
        plain = await one.ask(prompt, speculate=False)
        assert plain.stats.cache_source == "disk"
        assert plain.token_ids == greedy
    async with client(pairs["qwen3"], "cpu", store=tmp_path) as one:
        assert (await one.ask(prompt)).stats.cached_tokens == 0


@pytest.mark.slow
async def test_two_clients_at_once(
    pairs: dict[str, Pair], prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """One prefix from several requests at the same moment, computed as often as it may be, never wrongly."""
    prompt, greedy = prefix_cases["qwen3_5"]
    async with client(pairs["qwen3_5"], "cpu,cpu") as one:
        for _ in range(3):
            found = await asyncio.gather(*(one.ask(prompt) for _ in range(4)))
            assert [answer.token_ids for answer in found] == [greedy] * 4
        assert all(answer.stats.cached_tokens == len(prompt) for answer in found)


@pytest.mark.slow
async def test_a_full_memory_goes_on(
    pairs: dict[str, Pair], prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Room for a few prefixes: old ones go, new ones are kept and found, answers stay right; also when none fits."""
    prompt, greedy = prefix_cases["qwen3_5"]
    pair = pairs["qwen3_5"]
    others = [tuple(ids) for ids in checkpoints.random_prompts(256, 12, 5, [40] * 12)]
    budget = 256 << 10
    async with client(pair, "cpu,cpu", prefix_cache_bytes=budget) as one:
        await one.ask(prompt, tokens=2)
        await one.settle()
        worker = await when_idle(one.cluster, one.cluster.addresses[-1])
        assert 2 * worker.snapshot_bytes < budget < 4 * worker.snapshot_bytes
        for other in others:
            await one.ask(other, tokens=2)
            await one.settle()
            again = await one.ask(other, tokens=2)
            assert again.stats.cached_tokens == len(other)
        assert (await one.ask(others[0], tokens=2)).stats.cached_tokens == 0
        assert (await one.ask(prompt)).token_ids == greedy
        # Many at once, each evicting what others are about to take up.
        found = await asyncio.gather(*(one.ask(prompt) for _ in range(3)), *(one.ask(other) for other in others))
        assert [answer.token_ids for answer in found[:3]] == [greedy] * 3
        assert [answer.token_ids for answer in found[3:]] == [
            (await one.ask(other, cached=False)).token_ids for other in others
        ]
    async with client(pair, "cpu,cpu", prefix_cache_bytes=0) as one:
        for _ in range(2):
            answer = await one.ask(prompt)
            assert answer.token_ids == greedy
            assert answer.stats.cached_tokens == 0


async def test_a_worker_that_lost_its_memory(
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    start_worker: Callable[..., Worker],
) -> None:
    """A stage that no longer keeps a prefix makes a miss of the hit, not an error; then it is kept anew."""
    prompt, greedy = prefix_cases["qwen3_5"]
    first, second = start_worker(), start_worker()
    async with client(pairs["qwen3_5"], f"{first.address},{second.address}") as one:
        for address in (first.address, second.address):
            await one.ask(prompt)
            await one.settle()
            lineage = one.cache.lineage(with_draft=True)
            names = [lineage.snapshot_id(prompt[:length]) for length in range(1, len(prompt) + 1)]
            end = await one.ask(prompt, tokens=2)
            assert end.stats.cached_tokens == len(prompt)
            everything = [*names, *(lineage.snapshot_id((*prompt, *greedy[:count])) for count in range(1, TOKENS))]
            await (await one.cluster.snapshots(address)).free_snapshots(everything[::-1])

            missed = await one.ask(prompt)

            assert missed.token_ids == greedy
            assert missed.stats.cached_tokens == 0
            await one.settle()
            assert (await one.ask(prompt)).stats.cached_tokens == len(prompt)


@pytest.mark.slow
async def test_speculation_goes_on_at_full_acceptance(tmp_path: Path) -> None:
    """The demo pair, whose draft is good: as many draft tokens are accepted after a prefix from memory, and from disk
    on another split with the draft apart, as in the uninterrupted run."""
    pair = Pair(DEMO / "target", DEMO / "draft", 12)
    files = read_model_files(pair.target)
    asked = [
        [
            {"role": "system", "content": "You do sums, one after the other, and show how. " * 4},
            {"role": "user", "content": f"Calculate {first} + {second}."},
        ]
        for first, second in ((4729, 3485), (831, 2977), (56, 9148), (7777, 888))
    ]
    prompts = [chat_prompt(files, messages) for messages in asked]

    async def acceptance(one: Client, source: str | None) -> tuple[list[tuple[int, ...]], float]:
        answers = []
        for prompt in prompts:
            answer = await one.ask(
                prompt.token_ids,
                cached=source is not None,
                boundaries=prompt.boundaries,
                tokens=160,
                stop=files.stop_token_ids,
            )
            await one.settle()
            if source is not None:
                assert answer.stats.cache_source == source
                assert answer.stats.cached_tokens >= len(prompt.token_ids) - 8
            answers.append(answer)
        accepted = sum(answer.stats.accepted_tokens for answer in answers)
        return [answer.token_ids for answer in answers], accepted / sum(answer.stats.steps for answer in answers)

    async with client(pair, "cpu,cpu", "0.3,0.7", store=tmp_path) as one:
        cold_tokens, cold = await acceptance(one, None)
        for prompt in prompts:
            await one.ask(prompt.token_ids, boundaries=prompt.boundaries, tokens=2)
            await one.settle()
        warm_tokens, warm = await acceptance(one, "memory")
    async with client(pair, "cpu", draft_device="cpu", store=tmp_path) as one:
        disk_tokens, disk = await acceptance(one, "disk")

    assert cold_tokens == warm_tokens == disk_tokens
    assert cold > 4
    assert abs(warm - cold) <= 0.02 * cold
    assert abs(disk - cold) <= 0.02 * cold
