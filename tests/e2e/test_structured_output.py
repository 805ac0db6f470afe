"""Grammars and log-probabilities through real processes: a request's, its pieces' and its answer's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator.answer import Answer, Piece, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate as complete
from coordinator.text.model_files import read_model_files
from coordinator.text.prompt import chat_prompt
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, GrammarKind
from tests.e2e.conftest import ROOT
from tests.shard_worker.schemas import fits

DEMO = ROOT / "deploy" / "demo"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_grammar_and_logprobs_over_two_processes() -> None:
    """Plain and speculated alike: what fits the schema, with a number for every token; and refusals by field."""
    files = read_model_files(DEMO / "target")
    prompt = chat_prompt(files, [{"role": "user", "content": "Describe a cat in JSON, please."}]).token_ids
    request = Request(
        "s",
        prompt,
        80,
        sampling=SamplingParams(temperature=1.0, seed=3),
        stop_token_ids=files.stop_token_ids,
        logprobs=2,
        grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    )
    plan = make_plan(target_devices="cpu,cpu", layer_split=None, draft_device=None, num_layers=12, has_draft=True)

    async def main() -> tuple[list[Answer], list[Piece]]:
        pieces: list[Piece] = []
        async with Cluster(plan, Checkpoints(DEMO / "target", DEMO / "draft", "float32")) as cluster:
            answers = [
                await complete(cluster, replace(request, speculate=speculate), files.tokenizer, pieces.append)
                for speculate in (False, True)
            ]
            for grammar, field in (
                (Grammar(GrammarKind.REGEX, "("), "grammar.regex"),
                (Grammar(GrammarKind.LARK, "x" * 300_000), "grammar.lark"),
            ):
                with pytest.raises(InvalidArgument) as refused:
                    await complete(cluster, replace(request, grammar=grammar), files.tokenizer)
                assert refused.value.where["field"] == field
            with pytest.raises(InvalidArgument, match="logprobs is 21"):
                await complete(cluster, replace(request, logprobs=21), files.tokenizer)
            answers.append(await complete(cluster, replace(request, logprobs=None), files.tokenizer, pieces.append))
        return answers, pieces

    (plain, dflash, untold), pieces = asyncio.run(main())
    assert plain.token_ids == dflash.token_ids == untold.token_ids
    assert plain.finish_reason == "stop"
    assert plain.text is not None
    assert fits(json.loads(plain.text), SCHEMA)
    assert dflash.stats.draft_tokens > 0

    assert plain.logprobs is not None
    assert dflash.logprobs is not None
    assert len(plain.logprobs) == len(dflash.logprobs) == len(plain.token_ids)
    for one, other in zip(plain.logprobs, dflash.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)
        assert len(one.top_token_ids) == 2
    assert untold.logprobs is None
    assert "logprobs" not in untold.as_json()
    assert len(plain.as_json()["logprobs"]) == len(plain.token_ids)
    count = len(plain.token_ids)
    told = [one for piece in pieces for one in piece.logprobs]
    assert told == [*plain.logprobs, *dflash.logprobs]
    assert [token for piece in pieces for token in piece.token_ids] == list(plain.token_ids) * 3
    assert all(len(piece.logprobs) in (0, len(piece.token_ids)) for piece in pieces)
    assert count > 5
