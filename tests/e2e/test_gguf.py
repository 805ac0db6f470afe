"""The demo target as a GGUF file, served over two workers with its draft: one file is enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import generate
from tests.e2e.server import DEMO, Server, get, serving
from tests.reference.gguf_files import write_gguf

DRAFT = ("--draft", DEMO / "draft", "--dtype", "float32")
QUESTION = "Calculate 4729 + 3485."


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Several types in one file, as such files have them; rows of the demo are too short for K types."""
    if len(shape) != 2 or shape[1] % 32:
        return "F32"
    if "mlp" in name:
        return "Q5_1" if name.endswith("down_proj.weight") else "Q4_0"
    return "Q8_0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file, alone in its folder; and a checkpoint with the numbers that its matrices stand for."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "file").mkdir()
    path = write_gguf(DEMO / "target", folder / "file" / "Demo-Q4_0.gguf", mixed, folder / "dense")
    return path, folder / "dense"


@pytest.fixture(scope="module")
def server(model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, "--model", model[0], *DRAFT, "--target-devices", "cpu,cpu") as running:
        yield running


def test_answers_are_those_of_the_unpacked_checkpoint(model: tuple[Path, Path], client: openai.OpenAI) -> None:
    """With drafted blocks over two workers, against plain decoding of dense matrices by one."""
    assert [served.id for served in client.models.list()] == ["Demo-Q4_0"]
    said = generate(
        *("--model", model[1], "--dtype", "float32", "--target-devices", "cpu"),
        *("--chat", "--prompt", QUESTION, "--temperature", 0),
    )
    answer = client.chat.completions.create(
        model="Demo-Q4_0", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert answer.choices[0].message.content == said["text"]
    assert answer.choices[0].finish_reason == said["finish_reason"] == "stop"


@pytest.mark.slow
def test_three_uneven_workers_answer_as_one(model: tuple[Path, Path]) -> None:
    """With a memory limit for each, and layers shared as over a small card and two larger ones: the same tokens, of
    which as many were drafted and accepted."""
    told = [
        generate(
            *(
                "--model",
                model[0],
                *DRAFT,
                *devices,
                "--chat",
                "--prompt",
                QUESTION,
                "--temperature",
                0,
                "--max-tokens",
            ),
            96,
        )
        for devices in (
            ("--target-devices", "cpu"),
            (
                *("--target-devices", "cpu@300MiB,cpu@500MiB,cpu@500MiB"),
                *("--target-layer-split", "0.08,0.46,0.46"),
            ),
        )
    ]
    one, three = (answer["stats"] for answer in told)
    assert [(stage["first_layer"], stage["last_layer"]) for stage in three["stages"]] == [(0, 1), (1, 6), (6, 12)]
    assert told[0]["token_ids"] == told[1]["token_ids"]
    for counted in ("steps", "draft_tokens", "accepted_tokens", "draft_steps"):
        assert one[counted] == three[counted], counted
    assert three["accepted_tokens"] > 50


@pytest.mark.slow
def test_grammars_and_templates_come_out_of_the_file(client: openai.OpenAI, server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="Demo-Q4_0",
        messages=[{"role": "user", "content": "Say a number."}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        temperature=0,
        max_tokens=120,
    )
    assert json.loads(answer.choices[0].message.content or "")["n"] in (7, 8)
    status, content = get(f"{server.url}/tokenizer_info")
    told = json.loads(content)
    assert status == 200
    assert told["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in told["chat_template"]
