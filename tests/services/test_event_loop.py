"""Loops that live and die together."""

from __future__ import annotations

import asyncio

import pytest

from services.event_loop import first_done
from tests.services.fakes import until


class Loop:
    """Runs until it is told to end; counts its cancellations."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.fault: BaseException | None = None
        self.cancelled = 0
        self.running = False

    async def run(self) -> None:
        self.running = True
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault


async def test_the_first_end_cancels_the_rest() -> None:
    """When one loop returns, the other is cancelled and awaited."""
    ending, other = Loop(), Loop()
    ending.end.set()
    await first_done(other.run(), ending.run())
    assert (ending.cancelled, other.cancelled) == (0, 1)


async def test_an_error_is_raised_after_the_rest_has_ended() -> None:
    """The error of the loop that ended is raised; by then the other has been cancelled."""
    failing, other = Loop(), Loop()
    failing.end.set()
    failing.fault = ValueError("first")
    with pytest.raises(ValueError, match="first"):
        await first_done(other.run(), failing.run())
    assert other.cancelled == 1


@pytest.mark.parametrize("faults", [("a", "b"), (None, "b"), ("a", None)])
async def test_the_loop_named_first_decides(faults: tuple[str | None, str | None]) -> None:
    """Where both end in the same moment, the first one's return or error counts, every time."""
    for _ in range(20):
        first, second = Loop(), Loop()
        for loop, text in zip((first, second), faults, strict=True):
            loop.fault = ValueError(text) if text else None
            loop.end.set()
        if faults[0] is None:
            await first_done(first.run(), second.run())
        else:
            with pytest.raises(ValueError, match=faults[0]):
                await first_done(first.run(), second.run())


async def test_cancelling_cancels_all() -> None:
    """Cancelling the caller cancels every loop before the cancellation goes on."""
    loops = [Loop(), Loop()]
    task = asyncio.create_task(first_done(*(loop.run() for loop in loops)))
    await until(lambda: all(loop.running for loop in loops))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [loop.cancelled for loop in loops] == [1, 1]


async def test_an_error_on_the_way_out_is_dropped() -> None:
    """A loop that fails while it is cancelled doesn't hide the reason for it."""

    async def clumsy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("clumsy")

    failing = Loop()
    failing.end.set()
    failing.fault = KeyError("reason")
    with pytest.raises(KeyError):
        await first_done(clumsy(), failing.run())
