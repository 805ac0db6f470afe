"""Keys and values in 8-bit floats, in real processes: the same tokens whatever the placement, and kept prefixes that
nobody else takes up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from services.dtypes import FLOAT8
from services.messages.sampling import SamplingParams
from services.messages.steps import Forward, StepKind
from services.processes.launch import Launch
from tests.e2e.conftest import Pair, Worker, flashsplit, generate, refusal
from tests.e2e.exact_runs import DEMO, prompts, same
from tests.e2e.kv_runs import answers, difference
from tests.e2e.prefix_client import client
from tests.shard_worker.tiny import load_stage

PAIR = ("--model", DEMO / "target", "--draft", DEMO / "draft", "--dtype", "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "exact"), [("float32", False), pytest.param("bfloat16", True, marks=pytest.mark.slow)]
)
async def test_every_placement_gives_the_same_tokens(dtype: str, exact: bool) -> None:
    """Plain and with DFlash, on one worker and on two: chats and code, with draft tokens accepted."""
    asked = prompts(2, 1)
    plain, dflash, split = [
        await answers(asked, devices, 48, speculate=speculate, kv_dtype=FLOAT8, dtype=dtype, exact=exact)
        for devices, speculate in (("cpu", False), ("cpu", True), ("cpu,cpu", True))
    ]

    assert same(plain, dflash) == same(plain, split) == len(asked)
    assert sum(answer.stats.accepted_tokens for answer in dflash) > sum(answer.stats.steps for answer in dflash)


@pytest.mark.slow
def test_answers_are_nearly_those_without() -> None:
    """Over a few texts the distributions hardly differ, yet they do."""
    stages = [load_stage(DEMO / "target", dtype="float32", kv_dtype=kept) for kept in (None, FLOAT8)]

    found = difference(stages[0], stages[1], prompts(4, 3))

    assert found.positions > 500
    assert 1e-6 < found.divergence < 5e-3
    assert found.agreeing > 0.97 * found.positions


async def test_a_session_holds_a_quarter(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """Of float32, by what the workers say of themselves while it is open; and they say what they keep."""
    pair, held = pairs["qwen3"], []
    addresses = [start_worker().address for _ in range(2)]
    for kept in (None, FLOAT8):
        plan = make_plan(
            target_devices=",".join(addresses), layer_split=None, draft_device=None, num_layers=6, has_draft=False
        )
        files = Checkpoints(pair.target, None, "float32", kv_dtype=kept)
        async with Cluster(plan, files, launch=Launch(threads=1)) as cluster:
            workers = [await cluster.worker(address) for address in addresses]
            session = await cluster.open(
                request_id="r",
                max_length=300,
                max_rows=64,
                block_rows=1,
                prompt_length=64,
                sampling=SamplingParams(),
                stop_token_ids=frozenset(),
                speculate=False,
            )
            await session.forward(Forward(0, 0, tuple(range(1, 65)), StepKind.PREFILL))
            await anext(session.events())
            found = [await worker.describe() for worker in workers]
            await session.close()
            held.append([one.session_bytes for one in found])
            assert [one.target.kv_dtype for one in found if one.target is not None] == [kept, kept]

    assert all(held[0])
    assert held[0] == [4 * size for size in held[1]]


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
async def test_prefixes_are_taken_up_by_their_own_type_alone(
    family: str,
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    """From memory, and after a restart on another split from disk: as if computed; the other type finds nothing, in
    either direction, and leaves everything in its place."""
    pair, (prompt, greedy) = pairs[family], prefix_cases[family]
    async with client(pair, "cpu,cpu", "0.3,0.7", store=tmp_path, kv_dtype=FLOAT8) as one:
        cold = await one.ask(prompt, cached=False)
        first = await one.ask(prompt)
        await one.settle()
        again = await one.ask(prompt)
        assert first.stats.cached_tokens == 0
        assert again.stats.cached_tokens == len(prompt)
        assert cold.token_ids == first.token_ids == again.token_ids
    async with client(pair, "cpu", store=tmp_path) as one:
        other = await one.ask(prompt)
        assert other.stats.cached_tokens == 0
        assert other.token_ids == greedy
        await one.settle()
    async with client(pair, "cpu", draft_device="cpu", store=tmp_path, kv_dtype=FLOAT8) as one:
        found = await one.ask(prompt)
        assert found.stats.cache_source == "disk"
        assert found.stats.cached_tokens >= 48
        assert found.token_ids == cold.token_ids
    async with client(pair, "cpu", store=tmp_path) as one:
        found = await one.ask(prompt)
        assert found.stats.cache_source == "disk"
        assert found.token_ids == greedy


@pytest.mark.slow
async def test_the_other_type_on_the_same_worker(
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    start_worker: Callable[..., Worker],
) -> None:
    """A worker that stays loads anew for another type, and keeps nothing of the one before."""
    prompt, greedy = prefix_cases["qwen3_5"]
    worker = start_worker()
    for kept in (FLOAT8, None, FLOAT8):
        async with client(pairs["qwen3_5"], worker.address, kv_dtype=kept) as one:
            answer = await one.ask(prompt)
            await one.settle()
            assert answer.stats.cached_tokens == 0
            assert (await one.ask(prompt)).stats.cached_tokens == len(prompt)
            assert kept is not None or answer.token_ids == greedy


def test_the_command_line(tmp_path: Path) -> None:
    """What it says reaches workers and plans, and what it cannot say is refused."""
    asked = (*PAIR, "--prompt", "Once upon a time", "--max-tokens", "20")
    split = generate(*asked, "--kv-dtype", "fp8", "--target-devices", "cpu,cpu")
    assert split["token_ids"] == generate(*asked, "--kv-dtype", "fp8", "--no-speculation")["token_ids"]
    kept = []
    for word in ("auto", "fp8"):
        process = flashsplit("plan", *PAIR, "--kv-dtype", word, "--target-devices", "cpu", "--json")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        kept.append(json.loads(out))
    assert [one["kv_dtype"] for one in kept] == ["float32", FLOAT8]
    # Three layers of the twelve attend.
    taken = [one["devices"][0]["cache_bytes"]["4096"] for one in kept]
    assert taken[0] - taken[1] == 4096 * 3 * 2 * 128 * 3
    assert "'fp9' is not one of 'auto', 'fp8'" in refusal(*asked, "--kv-dtype", "fp9")
