"""Options about shortening prompts: what they mean together, and in which words they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.options.compression import CompressionOptions
from coordinator.cluster.placement import WorkerPlace
from services.errors import NotFound
from services.messages.inference_types import CompressionMode
from tests.coordinator.cli.command_line import parse, refusal


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint."""
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_defaults(drafter: Path) -> None:
    """Without a drafter nothing is compressed; with one, long prompts are, beside the first stage."""
    assert parse(CompressionOptions) == CompressionOptions()
    options = parse(CompressionOptions, "--prefill-drafter", drafter)
    assert (options.settings.mode, options.settings.threshold) == (CompressionMode.AUTO, 32000)
    assert options.places == ()


def test_what_is_given_is_taken(drafter: Path) -> None:
    """The mode, the threshold, the share that is kept and the place."""
    words = ["--prefill-drafter", drafter, "--prefill-threshold", 500, "--prefill-keep-ratio", "0.25"]
    options = parse(CompressionOptions, *words, "--prefill-device", "h:1")
    assert (options.settings.threshold, options.places) == (500, (WorkerPlace(None, "h:1"),))
    assert options.settings.keep.ratio(100) == options.settings.keep.ratio(10000) == 0.25
    options = parse(CompressionOptions, "--prefill-drafter", drafter, "--prefill-compression", "always")
    assert options.settings.mode is CompressionMode.ALWAYS


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--prefill-compression auto", "--prefill-compression has no effect without --prefill-drafter"),
        ("--prefill-threshold 5", "--prefill-threshold has no effect without --prefill-drafter"),
        ("--prefill-keep-ratio 0.1", "--prefill-keep-ratio has no effect without --prefill-drafter"),
        ("--prefill-device cpu", "--prefill-device has no effect without --prefill-drafter"),
        ("--prefill-compression sometimes", "'sometimes' is not one of 'off', 'auto', 'always'"),
        (
            "--prefill-drafter {drafter} --prefill-compression always --prefill-threshold 5",
            "--prefill-threshold has no effect with --prefill-compression always: leave out one of them",
        ),
        (
            "--prefill-drafter {drafter} --prefill-keep-ratio half",
            "--prefill-keep-ratio 'half' must be a number like 0.05",
        ),
        ("--prefill-drafter {drafter} --prefill-device tpu", "--prefill-device 'tpu' is neither a device"),
    ],
)
def test_refusals(drafter: Path, line: str, words: str) -> None:
    """Options without effect and values that are none."""
    assert words in refusal(CompressionOptions, *line.format(drafter=drafter).split())


def test_off_needs_no_drafter() -> None:
    """It is what happens without one anyway, so that a file may say it."""
    assert parse(CompressionOptions, "--prefill-compression", "off").settings.mode is CompressionMode.OFF


def test_a_drafter_needs_a_tokenizer(tmp_path: Path) -> None:
    """The directory that lacks one is named."""
    with pytest.raises(NotFound, match=f"--prefill-drafter {tmp_path} has no tokenizer.json"):
        CompressionOptions(prefill_drafter=tmp_path)
