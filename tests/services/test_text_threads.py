"""Work on texts: short ones do not wait behind large ones, and of large ones only so many wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.errors import ResourceExhausted
from services.text_threads import LARGE_BYTES, MAX_LARGE_WAITING, on_text_thread


async def test_short_texts_do_not_wait_behind_large_ones() -> None:
    """While large ones are in work, a short one is done; one large one too many is told to come again."""
    go = threading.Event()
    large = [asyncio.ensure_future(on_text_thread(LARGE_BYTES, go.wait)) for _ in range(MAX_LARGE_WAITING)]
    try:
        assert await on_text_thread(10, lambda: "done") == "done"
        with pytest.raises(ResourceExhausted, match="try again") as error:
            await on_text_thread(LARGE_BYTES, go.wait)
        assert error.value.where["retry_after_s"]
    finally:
        go.set()
    assert all(await asyncio.gather(*large))
    assert await on_text_thread(LARGE_BYTES, lambda: "done") == "done"


async def test_what_nobody_waits_for_is_not_begun() -> None:
    """A client that goes takes its waiting text with it."""
    go, begun = threading.Event(), threading.Event()
    first = asyncio.ensure_future(on_text_thread(LARGE_BYTES, go.wait))
    second = asyncio.ensure_future(on_text_thread(LARGE_BYTES, begun.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    go.set()
    assert await first
    await on_text_thread(LARGE_BYTES, lambda: None)
    assert not begun.is_set()
