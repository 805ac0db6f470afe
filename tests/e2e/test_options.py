"""Whatever one worker heeds, three heed: every option of a request and of a model, walked through on both."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from services.model.rope import parse_rope_scaling
from services.processes.launch import Launch
from shard_worker.weights.opening import open_checkpoint
from tests.e2e.conftest import Pair
from tests.reference import checkpoints, storage, target

PROMPT = tuple(range(7, 60))
HOT = {"temperature": 1.3, "seed": 5}
SAMPLING: Mapping[str, list[dict[str, Any]]] = {
    "logit_bias": [{"logit_bias": {3: 100.0}}, {"logit_bias": dict.fromkeys(range(0, 256, 2), -100.0)}],
    "repetition_penalty": [{"repetition_penalty": 1.8}],
    "presence_penalty": [{"presence_penalty": 1.5}],
    "frequency_penalty": [{"frequency_penalty": 1.5, **HOT}],
    "temperature": [{"temperature": 0.7}, {"temperature": 2.0}],
    "top_k": [{"top_k": 3, **HOT}],
    "top_p": [{"top_p": 0.4, **HOT}],
    "min_p": [{"min_p": 0.3, **HOT}],
    "seed": [{**HOT, "seed": 6}, {**HOT, "seed": 2**63}],
    "min_tokens": [{"min_tokens": 9}],
    "allowed_token_ids": [{"allowed_token_ids": tuple(range(0, 256, 3)), **HOT}],
    "bad_token_sequences": [{"bad_token_sequences": ((5,), (7, 9)), **HOT}],
}
REQUEST: Mapping[str, list[dict[str, Any]]] = {
    "prompt_ids": [{"prompt_ids": PROMPT[:1]}, {"prompt_ids": PROMPT * 3}],
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 60}],
    "stop_token_ids": [{"stop_token_ids": frozenset(range(0, 256, 9)), "sampling": SamplingParams(**HOT)}],
    "speculate": [{"speculate": False}, {"speculate": False, "sampling": SamplingParams(**HOT)}],
    "prefill_chunk": [{"prefill_chunk": 1}, {"prefill_chunk": 7}, {"prefill_chunk": 4096}],
    "boundaries": [{"boundaries": (5, 20)}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 20, "sampling": SamplingParams(**HOT)}],
    "prompt_logprobs": [{"prompt_logprobs": 0, "max_tokens": 0}, {"prompt_logprobs": 20, "prefill_chunk": 7}],
}
ELSEWHERE = {
    "request_id", "trace", "unique_id", "chat", "compression",
    # These need a tokenizer: test_demo_pair.py, test_fields.py, test_structured_output.py.
    "stop_strings", "include_stop", "skip_special_tokens", "grammar", "grammar_field",
    "sampling",
}  # fmt: skip


def walks() -> list[dict[str, Any]]:
    """Arguments of requests, one for each value of each option, and the plainest one."""
    requests = [change for changes in REQUEST.values() for change in changes]
    return [{}, *requests, *({"sampling": SamplingParams(**wish)} for wishes in SAMPLING.values() for wish in wishes)]


def test_none_is_left_out() -> None:
    # Words become sequences of tokens by a tokenizer, which there is none of here.
    assert {field.name for field in fields(SamplingParams)} == set(SAMPLING) | {"bad_words"}
    assert {field.name for field in fields(Request)} == set(REQUEST) | ELSEWHERE


@asynccontextmanager
async def cluster(pair: Pair, devices: str, dtype: str, *, rope_scaling: str | None = None) -> AsyncIterator[Cluster]:
    plan = make_plan(
        target_devices=devices, layer_split=None, draft_device=None, num_layers=pair.layers, has_draft=True
    )
    checkpoint = Checkpoints(pair.target, pair.draft, dtype, rope_scaling=rope_scaling)
    async with Cluster(plan, checkpoint, launch=Launch(threads=1)) as made:
        yield made


async def walk(made: Cluster, **fixed: Any) -> list[Answer]:
    """Answers to all of them, and a refusal of what the context cannot hold."""
    answers = []
    for number, change in enumerate(walks()):
        wishes: dict[str, Any] = {"prompt_ids": PROMPT, "max_tokens": 16, **change, **fixed}
        answers.append(await generate(made, Request(f"o{number}", **wishes), None))
    most = made.target.max_position
    with pytest.raises(InvalidArgument, match=str(most)):
        await generate(made, Request("beyond", PROMPT, most, **fixed), None)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["qwen3_5", *(pytest.param(case, marks=pytest.mark.slow) for case in ("sliding", "bfloat16"))]
)
async def test_one_worker_and_three(case: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A hybrid, attention within windows, and another element type (where rows of a block may differ: plainly)."""
    pair = pairs["qwen3_5"]
    if case == "sliding":
        target = checkpoints.write_qwen3(tmp_path / "target", layers=6, sliding=16)
        pair = Pair(target, checkpoints.write_draft(tmp_path / "draft", target), 6)
    dtype = "bfloat16" if case == "bfloat16" else "float32"
    fixed = {"speculate": False} if case == "bfloat16" else {}
    async with cluster(pair, "cpu", dtype) as one, cluster(pair, "cpu,cpu,cpu", dtype) as three:
        apart = zip(await walk(one, **fixed), await walk(three, **fixed), strict=True)
        for change, (whole, split) in zip(walks(), apart, strict=True):
            assert split.token_ids == whole.token_ids, change
            assert split.finish_reason == whole.finish_reason, change
            for mine, theirs in zip(whole.logprobs or (), split.logprobs or (), strict=True):
                assert mine.top_token_ids == theirs.top_token_ids, change
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            # The same chunks through other processes have the same bits.
            assert split.prompt == whole.prompt, change


async def test_rope_is_scaled_as_the_command_says(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """Answers are those of transformers with the same words in config.json, and the model is another one by name."""
    pair = pairs["qwen3"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaled = Path(shutil.copytree(pair.target, tmp_path / "scaled"))
    storage.edit_config(scaled, lambda config: config["rope_parameters"].update(yarn))
    prompt, tokens = target.clear_prompt(target.load(scaled), 50, 30)
    async with cluster(pair, "cpu", "float32", rope_scaling=parse_rope_scaling(json.dumps(yarn))) as made:
        answer = await generate(made, Request("scaled", tuple(prompt), 30), None)
        fingerprint = made.target.fingerprint
    assert list(answer.token_ids) == tokens
    assert fingerprint != open_checkpoint(pair.target).fingerprint
