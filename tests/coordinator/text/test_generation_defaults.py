"""The defaults of a checkpoint and of a command line: what is read, what is refused, what wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.options.generation import GenerationConfigOptions, GenerationDefaultsOptions
from coordinator.text.generation_defaults import GenerationDefaults, parse_default_sampling, read_generation_defaults
from services.errors import InvalidArgument, NotFound
from services.messages.sampling import SamplingParams
from tests.coordinator.cli.command_line import parse

PUBLISHED = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
"""As Qwen3 has it."""


def write(folder: Path, **settings: object) -> Path:
    """A folder with a generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_a_published_file(tmp_path: Path) -> None:
    """Its sampling parameters are the defaults; nothing limits answers."""
    defaults = read_generation_defaults(write(tmp_path, **PUBLISHED))
    assert defaults == GenerationDefaults(SamplingParams(temperature=0.6, top_k=20, top_p=0.95))
    assert list(defaults.numbers().items()) == [("temperature", 0.6), ("top_k", 20), ("top_p", 0.95)]
    assert (defaults.answer_tokens(900, chat=True), defaults.answer_tokens(900, chat=False)) == (900, 16)


@pytest.mark.parametrize(
    ("settings", "numbers", "max_tokens"),
    [
        ({}, {"temperature": 1.0}, None),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0, "top_p": 0.8}, None),
        ({"do_sample": True, "temperature": 1, "top_k": None}, {"temperature": 1.0}, None),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1.0}, {"temperature": 1.0}, None),
        ({"temperature": 2.0, "min_p": 0.05, "repetition_penalty": 1.1},
         {"repetition_penalty": 1.1, "temperature": 2.0, "min_p": 0.05}, None),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "max_new_tokens": 512},
         {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 1.0}, 512),
    ],
)  # fmt: skip
def test_what_files_say(tmp_path: Path, settings: Any, numbers: Any, max_tokens: int | None) -> None:
    """do_sample false is greedy, null is not given, and values that change nothing are off."""
    defaults = read_generation_defaults(write(tmp_path, **settings))
    assert defaults.numbers() == numbers
    assert defaults.max_tokens == max_tokens
    assert defaults.answer_tokens(900, chat=True) == (max_tokens or 900)
    assert defaults.answer_tokens(10, chat=True) == 10


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": -1}, "temperature is -1.0; it must be at least 0"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"top_p": True}, "top_p is True; it must be a number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number above 0"),
    ],
)
def test_what_cannot_be_a_default_is_refused(tmp_path: Path, settings: Any, says: str) -> None:
    """The refusal names the file, and the flag that leaves it out does so."""
    folder = write(tmp_path, **settings)
    with pytest.raises(InvalidArgument) as refused:
        read_generation_defaults(folder)
    assert refused.value.message == (
        f"{folder / 'generation_config.json'}: {says}; correct it, or leave the file out with --generation-config vllm"
    )
    assert read_generation_defaults(folder, "vllm") == GenerationDefaults()


def test_where_they_come_from(tmp_path: Path) -> None:
    """The model's folder, another folder or file, or nowhere; only a named one must be there."""
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    assert parse(GenerationConfigOptions).defaults(model) == GenerationDefaults()
    write(model, temperature=0.5)
    write(other, temperature=0.25)
    for words, temperature in (
        ((), 0.5),
        (("--generation-config", "auto"), 0.5),
        (("--generation-config", other), 0.25),
        (("--generation-config", other / "generation_config.json"), 0.25),
        (("--generation-config", "vllm"), None),
    ):
        assert parse(GenerationConfigOptions, *words).defaults(model).sampling.temperature == temperature
    with pytest.raises(NotFound, match="--generation-config is '.*nowhere', and there is no such file"):
        parse(GenerationConfigOptions, "--generation-config", tmp_path / "nowhere").defaults(model)


def test_flags_win_over_files(tmp_path: Path) -> None:
    """Each value for itself; 0 and 1 switch off what the file switches on."""
    model = write(tmp_path, **PUBLISHED, max_new_tokens=100)
    words = ("--default-sampling", " temperature=1.5, top_k=0,min_p=0.1", "--default-max-tokens", 7)
    defaults = parse(GenerationDefaultsOptions, *words).defaults(model)
    assert defaults.numbers() == {"temperature": 1.5, "top_p": 0.95, "min_p": 0.1}
    assert defaults.max_tokens == 7
    assert parse(GenerationDefaultsOptions).defaults(model).max_tokens == 100
    ignored = parse(GenerationDefaultsOptions, "--generation-config", "vllm", *words[:2]).defaults(model)
    assert ignored.numbers() == {"temperature": 1.5, "min_p": 0.1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heat=1", "'heat=1' must be KEY=VALUE with a key out of repetition_penalty, presence_penalty"),
        ("seed=1", "'seed=1' must be KEY=VALUE"),
        ("temperature", "temperature is ''; it must be a number"),
        ("top_k=many", "top_k is 'many'; it must be a whole number"),
        ("top_k=2.5", "top_k is 2.5; it must be a whole number"),
        ("temperature=0.5,top_p=7", "top_p is 7.0; it must be above 0 and at most 1"),
        ("temperature=nan", "temperature is nan; it must be a number"),
    ],
)
def test_default_sampling_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_default_sampling(text)
    assert refused.value.message.startswith(f"--default-sampling: {says}")
    assert refused.value.where["field"] == "--default-sampling"
