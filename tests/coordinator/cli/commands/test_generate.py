"""`flashsplit generate`: where its prompts come from, and which combinations it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.commands.generate import AnswerOptions, PromptOptions
from coordinator.text.generation_defaults import GenerationDefaults
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import Prompt
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from tests.coordinator.cli.command_line import parse

TARGET = Path(__file__).parents[4] / "deploy" / "demo" / "target"


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    """The demo model's tokenizer and chat template."""
    return read_model_files(TARGET)


def test_prompts_are_texts_files_or_ids(files: ModelFiles, tmp_path: Path) -> None:
    """The same text gives the same tokens from wherever it comes; several are several prompts."""
    (tmp_path / "a").write_text("Hello there")
    (tmp_path / "b").write_text("Bye")
    typed = parse(PromptOptions, "--prompt", "Hello there", "--prompt", "Bye").read(files)
    read = parse(PromptOptions, "--prompt-file", tmp_path / "a", "--prompt-file", tmp_path / "b").read(files)
    assert [source.prompt.token_ids for source in read] == [source.prompt.token_ids for source in typed]
    (ids,) = parse(PromptOptions, "--prompt-ids", "1, 2,3").read(files)
    assert (ids.prompt.token_ids, ids.messages) == ((1, 2, 3), ())


def test_a_chat_has_messages(files: ModelFiles) -> None:
    """They are kept, as compression goes by them; the template makes the prompt longer than its text."""
    (plain,) = parse(PromptOptions, "--prompt", "Hello").read(files)
    (chat,) = parse(PromptOptions, "--prompt", "Hello", "--chat", "--system", "Be kind.").read(files)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert len(chat.prompt.token_ids) > len(plain.prompt.token_ids)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "give exactly one of --prompt, --prompt-file and --prompt-ids"),
        ("--prompt a --prompt-ids 1", "give exactly one of --prompt, --prompt-file and --prompt-ids"),
        ("--prompt a --system b", "--system has no effect without --chat"),
        ("--prompt-ids 1 --chat", "--chat needs text: use --prompt or --prompt-file with it"),
        ("--prompt-ids 1,x", "--prompt-ids '1,x' must be whole numbers joined by commas"),
    ],
)
def test_refusals(files: ModelFiles, line: str, words: str) -> None:
    """Each says what to give in place."""
    with pytest.raises(InvalidArgument, match=words):
        parse(PromptOptions, *line.split()).read(files)


def test_a_file_must_be_text(files: ModelFiles, tmp_path: Path) -> None:
    """Its name is in the refusal."""
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match=f"--prompt-file {tmp_path / 'a'} is not UTF-8 text"):
        parse(PromptOptions, "--prompt-file", tmp_path / "a").read(files)


def test_what_a_request_is_made_of(files: ModelFiles) -> None:
    """Every option about answers reaches the request."""
    words = "--max-tokens 7 --stop a --stop b --no-speculation --prefill-chunk 16"
    sampling = SamplingParams(temperature=0.5, seed=3)
    more: Any = {"files": files, "context": 100, "chat": False}
    request = parse(AnswerOptions, *words.split()).request("r", Prompt((1, 2)), sampling, **more)
    assert (request.max_tokens, request.stop_strings, request.prefill_chunk) == (7, ("a", "b"), 16)
    assert (request.speculate, request.stop_token_ids) == (False, files.stop_token_ids)
    assert (request.prompt_ids, request.sampling) == ((1, 2), sampling)
    assert not parse(AnswerOptions, "--ignore-eos").request("r", Prompt((1,)), sampling, **more).stop_token_ids


def test_how_long_an_answer_may_become(files: ModelFiles) -> None:
    """As the APIs have it: what the context leaves for a chat, 16 tokens for a plain prompt, or the model's own."""
    short = replace(files, defaults=GenerationDefaults(max_tokens=9))
    for model, chat, tokens in ((files, True, 98), (files, False, 16), (short, True, 9), (short, False, 9)):
        request = parse(AnswerOptions).request("r", Prompt((1, 2)), SamplingParams(), model, context=100, chat=chat)
        assert (request.max_tokens, request.chat) == (tokens, chat)
