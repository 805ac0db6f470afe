"""The demo pair that ships: answers as transformers does, speculates well, and the commands around it work."""

from __future__ import annotations

import argparse
import ast
import asyncio
import bisect
import calendar
import csv
import decimal
import fractions
import heapq
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate as complete
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import chat_prompt
from tests.e2e.conftest import ROOT, Worker, flashsplit, generate
from tests.reference import target

DEMO = ROOT / "deploy" / "demo"
PAIR = ["--model", DEMO / "target", "--draft", DEMO / "draft"]
TWO = ["--target-devices", "cpu,cpu", "--target-layer-split", "0.3,0.7"]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return read_model_files(DEMO / "target")


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[Any]]:
    """Chats that the pair was not trained on."""
    kinds: dict[str, list[Any]] = json.loads((DEMO / "prompts.json").read_text())
    return kinds


def beginnings(count: int) -> list[str]:
    """Beginnings of modules of the running interpreter's library, for the model to write on."""
    modules = (ast, argparse, bisect, calendar, csv, decimal, fractions, heapq)
    return [Path(str(module.__file__)).read_text(encoding="utf-8")[:600] for module in modules[:count]]


def prompts_of(files: ModelFiles, held_out: dict[str, list[Any]], chat: int, code: int) -> list[tuple[int, ...]]:
    assert files.tokenizer is not None
    return [
        *(
            chat_prompt(files, [{"role": "user", "content": item["prompt"]}]).token_ids
            for item in held_out["chat"][:chat]
        ),
        *(tuple(files.tokenizer.encode(text, add_special_tokens=True)) for text in beginnings(code)),
    ]


async def ask(
    devices: str, prompts: list[tuple[int, ...]], split: str | None, tokens: int, *, speculate: bool
) -> list[Answer]:
    plan = make_plan(target_devices=devices, layer_split=split, draft_device=None, num_layers=12, has_draft=True)
    answers = []
    async with Cluster(plan, Checkpoints(DEMO / "target", DEMO / "draft", "float32")) as cluster:
        for number, prompt in enumerate(prompts):
            request = Request(f"d{number}", prompt, tokens, speculate=speculate)
            answers.append(await complete(cluster, request, None))
    return answers


def check(found: list[Answer], prompts: list[tuple[int, ...]], model: Any) -> None:
    """Every token is transformers' own choice after all tokens before it: its greedy run, in one forward a prompt."""
    for answer, prompt in zip(found, prompts, strict=True):
        logits = target.logits(model, [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :]
        margins = target.margins(logits)
        for index, (token, choice) in enumerate(zip(answer.token_ids, logits.argmax(-1).tolist(), strict=True)):
            assert token == choice, f"token {index}; the reference's margin there is {float(margins[index])}"


@pytest.mark.parametrize("speculate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_are_those_of_transformers(
    files: ModelFiles, held_out: dict[str, list[Any]], start_worker: Callable[..., Worker], speculate: bool
) -> None:
    """float32, two stages, a chat's prompt and one of code."""
    prompts = prompts_of(files, held_out, 1, 1)
    devices = f"{start_worker().address},{start_worker().address}"

    found = asyncio.run(ask(devices, prompts, "0.3,0.7", 60, speculate=speculate))

    check(found, prompts, target.load(DEMO / "target"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_prompts_at_every_cut(
    files: ModelFiles, held_out: dict[str, list[Any]], start_worker: Callable[..., Worker]
) -> None:
    """20 prompts of 200 tokens each, every cut into two stages, with DFlash; plain at one cut."""
    prompts = prompts_of(files, held_out, 12, 8)
    devices = f"{start_worker().address},{start_worker().address}"
    model = target.load(DEMO / "target")
    plain = asyncio.run(ask(devices, prompts, "0.3,0.7", 200, speculate=False))
    check(plain, prompts, model)
    for cut in range(1, 12):
        found = asyncio.run(ask(devices, prompts, f"{cut},{12 - cut}", 200, speculate=True))
        assert [one.token_ids for one in found] == [one.token_ids for one in plain], cut


def test_chat_is_answered_and_speculated_on(held_out: dict[str, list[Any]]) -> None:
    """A held-out question gets its answer, from blocks most of which are accepted."""
    case = max(held_out["chat"][:40], key=lambda item: len(item["answer"]))

    answer = generate(*PAIR, *TWO, "--chat", "--prompt", case["prompt"], "--dtype", "float32")

    assert answer["text"].strip() == case["answer"].strip()
    assert answer["finish_reason"] == "stop"
    stats = answer["stats"]
    assert stats["acceptance_length"] > 4
    assert stats["completion_tokens"] == len(answer["token_ids"])
    assert stats["accepted_tokens"] <= stats["draft_tokens"]
    assert [(stage["first_layer"], stage["last_layer"]) for stage in stats["stages"]] == [(0, 4), (4, 12)]
    assert all(stage["forward_ms"] > 0 for stage in stats["stages"])


@pytest.mark.slow
def test_seed_decides_whatever_the_split_and_draft(held_out: dict[str, list[Any]]) -> None:
    """One seed gives one answer: unsplit, split, plain, speculated; another seed gives another."""
    sampling = ["--temperature", "2.5", "--top-p", "0.99", "--top-k", "500", "--repetition-penalty", "1.3"]
    prompt = ["--chat", "--prompt", "Tell me a story.", "--max-tokens", "60", "--dtype", "float32", *sampling]

    one = generate(*PAIR, *prompt, "--target-devices", "cpu", "--seed", 7, "--no-speculation")
    two = generate(*PAIR, *prompt, *TWO, "--seed", 7)
    three = generate("--model", DEMO / "target", *prompt, "--target-devices", "cpu,cpu,cpu", "--seed", 7)
    other = generate(*PAIR, *prompt, *TWO, "--seed", 8)

    assert one["token_ids"] == two["token_ids"] == three["token_ids"]
    assert other["token_ids"] != one["token_ids"]
    assert two["stats"]["draft_tokens"] > 0


@pytest.mark.slow
def test_stop_string_cuts_text_and_tokens_alike() -> None:
    """Text ends before the stop string, and plain and speculated runs end at the same token."""
    asked = ["--chat", "--prompt", "Calculate 4729 + 3485.", "--stop", "carry 1.", "--dtype", "float32"]

    plain = generate(*PAIR, *TWO, *asked, "--no-speculation")
    dflash = generate(*PAIR, *TWO, *asked)

    assert plain["finish_reason"] == dflash["finish_reason"] == "stop"
    assert plain["token_ids"] == dflash["token_ids"]
    assert "carry" not in plain["text"]
    assert plain["text"] == dflash["text"]
    assert plain["text"].endswith("and ")


@pytest.mark.slow
def test_streamed_text_is_the_json_text() -> None:
    """stdout holds the answer and nothing else; figures go to stderr."""
    asked = ["--model", DEMO / "target", "--chat", "--prompt", "Good evening!", "--target-devices", "cpu"]
    process = flashsplit("generate", *asked)
    out, err = process.communicate(timeout=60)

    assert out == generate(*asked)["text"] + "\n"
    assert "tokens/s" in err


def test_demo_command_reports_equal_tokens() -> None:
    """`flashsplit demo`, as `make demo` calls it, exits 0 and says that both runs gave the same tokens."""
    command = [sys.executable, "-m", "coordinator", "demo", "--model", DEMO / "target", "--draft", DEMO / "draft"]
    done = subprocess.run([*command, "--max-tokens", "60"], cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    assert "8214" in done.stdout or "carry" in done.stdout
    assert "same tokens" in done.stderr
