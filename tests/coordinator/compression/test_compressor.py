"""Whether a text is shortened, and what becomes of a failure, with a drafter that keeps what the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.compression.compressor import Compressor
from coordinator.compression.settings import CompressionSettings, KeepCurve
from coordinator.text.tokenizer import Tokenizer
from services.errors import FlashsplitError, Unavailable
from services.messages.compression import Compressed
from services.messages.inference_types import CompressionMode
from services.processes.worker_process import WorkerFailed
from tests.e2e.conftest import ROOT

TEXT = "A keeper lived by the sea and kept a light. " * 40 + "\n\nWhere did he live?"
KEEP = KeepCurve(((0, 0.2),))
ALWAYS = CompressionSettings(CompressionMode.ALWAYS, 0, KEEP)
AUTO = CompressionSettings(CompressionMode.AUTO, 1000, KEEP)
OFF = CompressionSettings(CompressionMode.OFF, 0, KEEP)


class FakeDrafter:
    """Keeps a text's first tokens, or all of them; reads a thousand tokens a second. fault: what `compress` raises."""

    def __init__(self) -> None:
        self.kept_tokens: int | None = 10
        self.fault: FlashsplitError | None = None
        self.ratios: list[float] = []

    async def compress(self, request_id: str, token_ids: tuple[int, ...], ratio: float) -> Compressed:
        if self.fault is not None:
            raise self.fault
        self.ratios.append(ratio)
        last = len(token_ids) if self.kept_tokens is None else self.kept_tokens
        return Compressed(((0, last),), len(token_ids) * 1_000_000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_checkpoint(ROOT / "deploy" / "demo" / "target")
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def drafter() -> FakeDrafter:
    return FakeDrafter()


@pytest.fixture
def compressor(drafter: FakeDrafter, tokenizer: Tokenizer) -> Compressor:
    return Compressor(drafter, tokenizer, ALWAYS)  # type: ignore[arg-type]


async def test_what_the_drafter_keeps_and_the_question_stay(compressor: Compressor, drafter: FakeDrafter) -> None:
    """The text's beginning, as the drafter says, and its last paragraph, in order; the settings' share is asked for."""
    shortened = await compressor.shorten("r1", TEXT, 5000, ALWAYS)
    assert shortened.text is not None
    assert shortened.text.endswith("Where did he live?")
    assert TEXT.startswith(shortened.text.removesuffix("Where did he live?"))
    assert len(shortened.text) < len(TEXT) / 4
    assert shortened.note is None
    assert drafter.ratios == [0.2]


async def test_a_text_is_read_once(compressor: Compressor, drafter: FakeDrafter) -> None:
    """The same text with the same share is not read again; with another share it is."""
    first = await compressor.shorten("r1", TEXT, 5000, ALWAYS)
    again = await compressor.shorten("r2", TEXT, 5000, ALWAYS)
    assert again.text == first.text
    assert len(drafter.ratios) == 1
    await compressor.shorten("r3", TEXT, 5000, CompressionSettings(CompressionMode.ALWAYS, 0, KeepCurve(((0, 0.5),))))
    assert drafter.ratios == [0.2, 0.5]


@pytest.mark.parametrize(("settings", "prompt_tokens"), [(OFF, 50_000), (AUTO, 999)])
async def test_a_text_that_need_not_be_shortened(
    compressor: Compressor, drafter: FakeDrafter, settings: CompressionSettings, prompt_tokens: int
) -> None:
    """Compression that is off, and a prompt below the threshold: nothing is read, and there is nothing to say."""
    shortened = await compressor.shorten("r1", TEXT, prompt_tokens, settings)
    assert (shortened.text, shortened.note) == (None, None)
    assert drafter.ratios == []


async def test_a_text_of_which_all_is_kept(compressor: Compressor, drafter: FakeDrafter) -> None:
    """It goes on as it is."""
    drafter.kept_tokens = None
    assert (await compressor.shorten("r1", TEXT, 5000, ALWAYS)).text is None


async def test_reading_that_takes_longer_than_it_saves(compressor: Compressor, drafter: FakeDrafter) -> None:
    """Once both speeds are measured, a fast target gets the whole text, unless compression is asked for always."""
    assert (await compressor.shorten("r1", TEXT, 5000, AUTO)).text is not None
    compressor.observe_prefill(10**9, 1.0)
    shortened = await compressor.shorten("r2", TEXT + "?", 5000, AUTO)
    assert shortened.text is None
    assert shortened.note is not None
    assert "longer than it saves" in shortened.note
    assert (await compressor.shorten("r3", TEXT + "?", 5000, ALWAYS)).text is not None


async def test_a_slow_target_gets_the_shorter_text(compressor: Compressor) -> None:
    """Where computing the prompt takes longer than reading it, compression pays."""
    await compressor.shorten("r1", TEXT, 5000, AUTO)
    compressor.observe_prefill(10, 1.0)
    assert (await compressor.shorten("r2", TEXT + "?", 5000, AUTO)).text is not None


async def test_a_failure_loses_no_request(
    compressor: Compressor, drafter: FakeDrafter, json_events: Callable[[], list[dict[str, Any]]]
) -> None:
    """The whole text goes on with a note that says why; a dead worker's lines are in the log, not in the note."""
    drafter.fault = WorkerFailed("the worker for cpu was killed", ['{"level": "info", "event": "load.started"}'])
    shortened = await compressor.shorten("r1", TEXT, 5000, ALWAYS)
    assert (shortened.text, shortened.note) == (None, "not compressed: the worker for cpu was killed")
    [event] = json_events()
    assert (event["event"], event["why"]) == ("compress.failed", "the worker for cpu was killed")
    assert event["last_lines"] == [{"level": "info", "event": "load.started"}]
    drafter.fault = Unavailable("busy")
    assert (await compressor.shorten("r2", TEXT, 5000, ALWAYS)).note == "not compressed: busy"
    drafter.fault = None
    assert (await compressor.shorten("r3", TEXT, 5000, ALWAYS)).text is not None
