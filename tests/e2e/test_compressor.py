"""A drafter in a process of its own: what is left of a text, what a failure costs, and starting again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.cluster.placement import WorkerPlace
from coordinator.compression.compressor import Compressor
from coordinator.compression.drafter_text import question_span
from coordinator.compression.drafter_worker import DrafterWorker
from coordinator.compression.settings import CompressionSettings, KeepCurve
from coordinator.text.tokenizer import Tokenizer
from services.messages.compression import Compressed
from services.messages.inference_types import CompressionMode
from services.processes.launch import Launch
from tests.e2e.conftest import ROOT
from tests.reference import checkpoints

TOKENIZER = ROOT / "deploy" / "demo" / "target" / "tokenizer.json"
ALWAYS = CompressionSettings(CompressionMode.ALWAYS, 0, KeepCurve(((0, 0.2),)))
STORY = "The keeper of the lighthouse counts the ships, and writes each name down. Überraschung! 日本語。\n" * 120
TEXT = STORY + "\n\nWhat does the keeper count?"


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 that reads with the demo pair's tokens."""
    folder = checkpoints.write_qwen3(tmp_path_factory.mktemp("drafter") / "qwen3", layers=4, vocab=8192, tied=True)
    shutil.copy(TOKENIZER, folder)
    return folder


@pytest.fixture
async def worker(drafter: Path) -> AsyncIterator[DrafterWorker]:
    made = DrafterWorker(WorkerPlace("cpu", None), drafter, dtype="float32", launch=Launch(threads=1))
    yield made
    await made.close()
    await made.close()


@pytest.fixture
def tokenizer(drafter: Path) -> Tokenizer:
    found = Tokenizer.from_checkpoint(drafter)
    assert found is not None
    return found


def subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


async def test_a_long_text_gets_short(worker: DrafterWorker, tokenizer: Tokenizer) -> None:
    compressor = Compressor(worker, tokenizer, ALWAYS)
    first = await compressor.shorten("a", TEXT, 5000, ALWAYS)
    again = await compressor.shorten("b", TEXT, 5000, ALWAYS)

    assert first.text is not None
    assert again.text == first.text
    assert first.note is None
    assert subsequence(first.text, TEXT)
    assert first.text.endswith(TEXT[question_span(TEXT)[0] :])
    whole, left = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (TEXT, first.text))
    assert 0.15 * whole < left < 0.25 * whole + 40
    everything = CompressionSettings(CompressionMode.ALWAYS, 0, KeepCurve(((0, 1.0),)))
    assert (await compressor.shorten("c", TEXT, 5000, everything)).text is None


async def test_when_it_is_left_alone(worker: DrafterWorker, tokenizer: Tokenizer) -> None:
    compressor = Compressor(worker, tokenizer, ALWAYS)
    for settings in (CompressionSettings(CompressionMode.OFF, 0), CompressionSettings(CompressionMode.AUTO, 5001)):
        assert (await compressor.shorten("a", TEXT, 5000, settings)).text is None
    auto = CompressionSettings(CompressionMode.AUTO, 5000, KeepCurve(((0, 0.2),)))
    assert (await compressor.shorten("a", TEXT, 5000, auto)).text is not None
    # As fast a target as this saves nothing.
    compressor.observe_prefill(10**9, 1.0)
    left = await compressor.shorten("b", TEXT + "?", 5000, auto)
    assert left.text is None
    assert left.note is not None
    assert "longer than it saves" in left.note
    assert (await compressor.shorten("c", TEXT + "?", 5000, ALWAYS)).text is not None


async def test_a_lost_drafter_loses_no_request(
    worker: DrafterWorker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 while it reads: the text goes on whole, with the reason; the next one is read by a new process."""
    compressor = Compressor(worker, tokenizer, ALWAYS)
    await worker.start()
    assert worker.description is not None
    pid = worker.description.process_id
    begun, compress = asyncio.Event(), worker.compress

    async def noting(request_id: str, token_ids: tuple[int, ...], ratio: float) -> Compressed:
        begun.set()
        return await compress(request_id, token_ids, ratio)

    monkeypatch.setattr(worker, "compress", noting)
    running = asyncio.ensure_future(compressor.shorten("a", TEXT * 6, 30000, ALWAYS))
    # Behind the text's tokens, which a busy machine takes long to find: before, another process would read it.
    await begun.wait()
    await asyncio.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    lost = await running
    assert lost.text is None
    assert lost.note is not None
    assert "killed by SIGKILL" in lost.note

    after = await compressor.shorten("b", TEXT, 5000, ALWAYS)
    assert after.text is not None
    assert worker.description.process_id != pid


async def test_a_drafter_that_cannot_be_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    worker = DrafterWorker(WorkerPlace("cpu", None), tmp_path, launch=Launch(threads=1))
    try:
        failed = await Compressor(worker, tokenizer, ALWAYS).shorten("a", TEXT, 5000, ALWAYS)
        assert failed.text is None
        assert failed.note is not None
        assert "config.json" in failed.note
    finally:
        await worker.close()
