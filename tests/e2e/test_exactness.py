"""The promise: in float32 the tokens of every placement, plain and speculated, are those of transformers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from services.messages.description import FeatureTransport, HeadPlace
from tests.e2e.conftest import ROOT, Pair, Worker, generate as run_generate, when_idle
from tests.reference import target

TOKENS = 40
LONG = 200


def expected(pair: Pair, lengths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Prompts of different lengths with clear margins, and what transformers says to them."""
    model = target.load(pair.target)
    return [target.clear_prompt(model, length, TOKENS, seed=10 * length) for length in lengths]


async def answer_all(
    prompts: list[list[int]],
    pair: Pair,
    devices: str,
    split: str | None = None,
    *,
    speculate: bool = True,
    draft_device: str | None = None,
    head: HeadPlace = HeadPlace.LOADED,
    transport: FeatureTransport = FeatureTransport.SUM,
    prefill_chunk: int = 16,
    tokens: int = TOKENS,
    drafted: bool = True,
    lookup: bool = False,
) -> list[Answer]:
    """Answers to all prompts, asked at once."""
    plan = make_plan(
        target_devices=devices,
        layer_split=split,
        draft_device=draft_device,
        num_layers=pair.layers,
        has_draft=drafted,
    )
    checkpoints = Checkpoints(pair.target, pair.draft if drafted else None, "float32", head, transport)

    async def one(cluster: Cluster, number: int, prompt: list[int]) -> Answer:
        request = Request(f"r{number}", tuple(prompt), tokens, speculate=speculate, prefill_chunk=prefill_chunk)
        return await generate(cluster, request, None, prompt_lookup=lookup)

    async with Cluster(plan, checkpoints) as cluster:
        work = [one(cluster, number, prompt) for number, prompt in enumerate(prompts)]
        answers = list(await asyncio.gather(*work))
        for address in cluster.addresses:
            await when_idle(cluster, address)
    return answers


def check(answers: list[Answer], cases: list[tuple[list[int], list[int]]]) -> None:
    for answer, (_, tokens) in zip(answers, cases, strict=True):
        assert list(answer.token_ids) == tokens
        assert answer.finish_reason == "length"


APART = [*product((HeadPlace.LOADED, HeadPlace.PROJECTED), FeatureTransport)]
"""Ways in which a draft of its own worker is connected."""


@pytest.mark.parametrize(
    ("family", "lengths", "apart"),
    [
        pytest.param("qwen3_5", (1, 40), [APART[0], APART[-1]], id="some"),
        *(
            pytest.param(family, (1, 2, 5, 40), APART, id=family, marks=pytest.mark.slow)
            for family in ("qwen3", "qwen3_5")
        ),
    ],
)
def test_every_placement_gives_transformers_tokens(
    family: str,
    lengths: tuple[int, ...],
    apart: list[tuple[HeadPlace, FeatureTransport]],
    pairs: dict[str, Pair],
    start_worker: Callable[..., Worker],
) -> None:
    """One, two and three workers, plain and speculated, draft beside or apart, summed or sliced features, and with
    draft tokens that are looked up in the text. By default a draft that is apart has each place of its head and each
    kind of features once."""
    pair = pairs[family]
    cases = expected(pair, lengths)
    prompts = [prompt for prompt, _ in cases]
    one, two, three, four = (start_worker().address for _ in range(4))

    async def run() -> None:
        for speculate in (False, True):
            check(await answer_all(prompts, pair, one, speculate=speculate), cases)
            check(await answer_all(prompts, pair, f"{one},{two}", "0.3,0.7", speculate=speculate), cases)
        check(await answer_all(prompts, pair, f"{one},{two},{three}", prefill_chunk=7), cases)
        both = f"{one},{two}"
        check(await answer_all(prompts, pair, both, lookup=True), cases)
        # Whatever comes next, it stood behind these tokens before.
        known = [[token for last in range(256) for token in (1, 2, 3, 4, 5, last)] + [1, 2, 3, 4, 5]]
        [plain] = await answer_all(known, pair, both, speculate=False, prefill_chunk=512)
        [found] = await answer_all(known, pair, both, drafted=False, lookup=True, prefill_chunk=512)
        assert found.token_ids == plain.token_ids
        assert found.stats.lookup_tokens > 0
        check(await answer_all(prompts, pair, both, transport=FeatureTransport.SLICES), cases)
        for head, transport in apart:
            answers = await answer_all(prompts, pair, both, draft_device=four, head=head, transport=transport)
            check(answers, cases)
            assert all(answer.stats.draft_tokens > 0 for answer in answers)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_twenty_prompts_at_every_cut(family: str, pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """20 prompts of 200 tokens, every cut into two stages, plain, speculated, and with what stands in the text."""
    pair = pairs[family]
    model = target.load(pair.target)
    cases = [target.clear_prompt(model, 3 + 2 * seed, LONG, seed=100 * seed) for seed in range(20)]
    prompts = [prompt for prompt, _ in cases]
    devices = ",".join(start_worker().address for _ in range(2))

    async def run() -> None:
        for cut in range(1, pair.layers):
            for speculate, lookup in ((False, False), (True, False), (True, True)):
                split = f"{cut},{pair.layers - cut}"
                found = await answer_all(prompts, pair, devices, split, speculate=speculate, tokens=LONG, lookup=lookup)
                check(found, cases)

    asyncio.run(run())


def test_checkpoint_paths_are_the_workers_own(
    pairs: dict[str, Pair], start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A worker with --model and --draft serves its own copies, whatever path the coordinator names."""
    pair = pairs["qwen3"]
    worker = start_worker("--model", str(pair.target), "--draft", str(pair.draft))
    elsewhere = Pair(tmp_path / "not-there", tmp_path / "nor-here", pair.layers)

    answers = asyncio.run(answer_all([[1, 2, 3]], elsewhere, worker.address))

    assert len(answers[0].token_ids) == TOKENS


def test_workers_of_another_environment(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """--worker-command starts the program of another virtual environment, as for another vendor's torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text("\n".join([str(ROOT), str(ROOT / "proto"), *map(str, sys.path[1:])]))
    program, told = tmp_path / "env" / "bin" / "flashsplit-worker", tmp_path / "told"
    program.write_text(
        f"#!{tmp_path}/env/bin/python\nimport sys\nfrom shard_worker.__main__ import main\n"
        f"open('{told}', 'a').write(sys.prefix + '\\n')\nmain()\n"
    )
    program.chmod(0o755)
    asked = ("--model", pairs["qwen3"].target, "--prompt-ids", "1,2,3", "--max-tokens", "12", "--dtype", "float32")

    ours = run_generate(*asked, "--target-devices", "cpu,cpu")
    theirs = run_generate(*asked, "--target-devices", "cpu,cpu", "--worker-command", f"cpu={program}")

    assert theirs["token_ids"] == ours["token_ids"]
    assert told.read_text() == f"{tmp_path / 'env'}\n" * 2
