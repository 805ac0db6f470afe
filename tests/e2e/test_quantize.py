"""Matrices packed while they are loaded, in real processes: the same tokens whatever the placement, and kept prefixes
that no other packing takes up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.model.quantization import Quantization, QuantizedTo
from tests.e2e.conftest import Pair, Worker, flashsplit, generate, refusal
from tests.e2e.exact_runs import DEMO, same
from tests.e2e.prefix_client import client
from tests.e2e.quantize_runs import answers, cases, divergence
from tests.shard_worker.tiny import load_stage

PAIR = ("--model", DEMO / "target", "--draft", DEMO / "draft")
INT4, INT8 = Quantization(QuantizedTo.INT4), Quantization(QuantizedTo.INT8)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [INT4, pytest.param(INT8, marks=pytest.mark.slow)], ids=str)
async def test_every_placement_gives_the_same_tokens(quantization: Quantization) -> None:
    """Plain and with a packed DFlash draft, on one worker and on two: right answers, with draft tokens accepted."""
    files, asked, right = cases(2)
    assert files.tokenizer is not None
    runs = [
        await answers(
            asked,
            files.stop_token_ids,
            devices,
            quantization=quantization,
            draft_quantization=INT4,
            dtype="bfloat16",
            speculate=speculate,
            exact=True,
        )
        for devices, speculate in (("cpu", False), ("cpu,cpu", True))
    ]
    assert same(*runs) == len(asked)
    assert [files.tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in runs[0]] == right
    assert sum(answer.stats.accepted_tokens for answer in runs[1]) > sum(answer.stats.steps for answer in runs[1])


@pytest.mark.slow
def test_answers_are_nearly_those_without() -> None:
    """Over a few chats: 8 bits within a thousandth of a nat, 4 bits a little further; neither is the same."""
    files, asked, right = cases(4)
    assert files.tokenizer is not None
    texts = [
        (prompt, files.tokenizer.encode(answer, add_special_tokens=False))
        for prompt, answer in zip(asked, right, strict=True)
    ]
    stages = [load_stage(DEMO / "target", dtype="float32", quantization=one) for one in (None, INT8, INT4)]
    found = [divergence(stages[0], stage, texts) for stage in stages[1:]]
    assert 0 < found[0] < 1e-3
    assert found[0] < found[1] < 1e-2


@pytest.mark.slow
async def test_prefixes_are_taken_up_by_their_own_packing_alone(
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """Neither from disk nor on a worker that stays, which loads anew for another one."""
    pair, (prompt, greedy) = pairs["qwen3_5"], prefix_cases["qwen3_5"]
    address, cold = start_worker().address, {}
    for quantization in (INT8, None):
        async with client(pair, address, store=tmp_path, quantization=quantization) as one:
            first = await one.ask(prompt)
            await one.settle()
            again = await one.ask(prompt)
            assert first.stats.cached_tokens == 0
            assert again.stats.cached_tokens == len(prompt)
            assert first.token_ids == again.token_ids
            cold[quantization] = first.token_ids
    assert cold[None] == greedy
    async with client(pair, "cpu,cpu", store=tmp_path, quantization=INT8) as one:
        found = await one.ask(prompt)
        assert found.stats.cache_source == "disk"
        assert found.token_ids == cold[INT8]


def test_the_command_line() -> None:
    """What it says reaches workers and plans, and what has no effect or no sense is refused."""
    asked = (*PAIR, "--prompt", "Once upon a time", "--max-tokens", "20", "--quantize", "int4", "--dtype", "float32")
    split = generate(*asked, "--target-devices", "cpu,cpu", "--quantize-draft", "int8")
    assert split["token_ids"] == generate(*asked, "--no-speculation")["token_ids"]
    taken = []
    for words in ((), ("--quantize", "int4", "--quantize-head")):
        process = flashsplit("plan", *PAIR, *words, "--target-devices", "cpu", "--json")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        taken.append(json.loads(out)["devices"][0]["weight_bytes"])
    assert 0.5 > taken[1] / taken[0] > 0.25
    assert "--quantize-head has no effect without --quantize" in refusal(*PAIR, "--prompt", "x", "--quantize-head")
    no_draft = ("--model", DEMO / "target", "--prompt", "x", "--quantize-draft", "int8")
    assert "--quantize-draft int8 has no effect without --draft" in refusal(*no_draft)
