"""Which checkpoint a command works with."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.options.compression import CompressionOptions
from coordinator.cli.options.model import ModelOptions
from tests.coordinator.cli.command_line import parse, refusal


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (ModelOptions, ["--model", "Qwen/Qwen3-8B"]),
        (ModelOptions, ["--model", ".", "--draft", "Qwen/Qwen3-8B"]),
        (CompressionOptions, ["--prefill-drafter", "Qwen/Qwen3-8B"]),
    ],
)
def test_a_name_on_the_hub_is_refused_with_how_to_download_it(group: type[object], words: list[str]) -> None:
    """Nothing is downloaded by itself; the line can be copied."""
    said = refusal(group, *words)
    assert f"'{words[-2]}'" in said
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B, then name Qwen3-8B" in said


def test_a_directory_that_is_called_like_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there comes first; any other path that is not there is just that."""
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse(ModelOptions, "--model", "Qwen/Qwen3-8B").model == Path("Qwen/Qwen3-8B")
    assert "does not exist" in refusal(ModelOptions, "--model", "/models/Qwen3-8B")
