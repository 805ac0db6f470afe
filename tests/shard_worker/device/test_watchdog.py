"""A device that hangs is told from one that has much to do, by what its steps have cost and by signs of life."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from services.errors import Unavailable
from shard_worker.device import watchdog as module
from shard_worker.device.executor import DeviceThread
from shard_worker.device.watchdog import FACTOR, FIRST_S, FLOOR_S, LOOK_S, StepCosts, Watchdog, Work


@pytest.fixture
async def thread() -> AsyncIterator[DeviceThread]:
    thread = DeviceThread(1)
    yield thread
    thread.shutdown()


class Stuck:
    """A job that holds the thread up in a native call, as a device does that hangs, until it is released."""

    def __init__(self) -> None:
        self.begun, self._released = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self._released.wait(60)
        return "late"

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 10)

    def release(self) -> None:
        self._released.set()


def looks(watchdog: Watchdog, seconds: float) -> list[float | None]:
    """What the watchdog says at each look within so many seconds of its time."""
    return [watchdog.look() for _ in range(round(seconds / LOOK_S))]


# --- how long a step may take


def test_a_step_may_take_a_multiple_of_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """First steps have long; then it depends on the cost of steps like it, down to a floor; outliers fade."""
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    costs = StepCosts()

    def step(kind: str, rows: int, seconds: float) -> float | None:
        nonlocal now
        work = Work()
        costs.expect(work, kind, rows)
        now += seconds
        costs.ended(work)
        return work.allowed_s

    assert step("step", 1, 30.0) == FIRST_S
    assert step("step", 1, 0.01) == FACTOR * 30
    assert step("step", 1000, 2.0) >= FACTOR * 1000 * 0.01
    assert step("draft", 1, 0.1) == FIRST_S
    for _ in range(100):
        step("step", 1, 0.01)
    assert step("step", 1, 0.01) == FLOOR_S
    assert step("step", 1000, 2.0) == pytest.approx(FACTOR * 2.0)
    given_up = Work()
    costs.expect(given_up, "step", 1)
    given_up.given_up = True
    now += 1000
    costs.ended(given_up)
    assert step("step", 1, 0.01) == FLOOR_S


# --- on a real thread


async def test_a_step_that_does_not_end(thread: DeviceThread) -> None:
    """It is noticed when its time is over, also while other jobs wait, and it is over when the step ends."""
    watchdog, stuck = Watchdog(thread), Stuck()

    def step() -> str:
        thread.computes("step", 1)
        return "done"

    def stuck_step() -> str:
        thread.computes("step", 1)
        return stuck()

    assert await thread.submit(step) == "done"
    running = thread.submit(stuck_step)
    await stuck.wait()
    waiting = thread.submit(step)
    assert not any(looks(watchdog, FLOOR_S))
    assert watchdog.look() == FLOOR_S + LOOK_S
    stuck.release()
    assert (await running, await waiting) == ("late", "done")
    assert watchdog.look() is None


async def test_first_steps_and_loads_take_longer(thread: DeviceThread) -> None:
    """What has no like may take long, and a load as long as it likes."""
    watchdog, first, load = Watchdog(thread), Stuck(), Stuck()
    running = thread.submit(first)
    await first.wait()
    assert not any(looks(watchdog, FIRST_S))
    assert watchdog.look() is not None
    first.release()
    await running
    loading = thread.submit_long(load)
    await load.wait()
    assert not any(looks(watchdog, 10 * FIRST_S))
    load.release()
    await loading


async def test_a_thread_that_takes_no_jobs(thread: DeviceThread) -> None:
    """One that hangs between two jobs is noticed though nobody waits for it: the watchdog's own job is not done."""
    watchdog, stuck = Watchdog(thread), Stuck()
    # Between two jobs the thread reads sockets; what a socket brings runs there and is no job.
    ours, theirs = socket.socketpair()
    thread.watch(theirs, stuck)
    ours.send(b"x")
    await stuck.wait()
    assert any(looks(watchdog, FLOOR_S + 2 * LOOK_S))
    stuck.release()
    await thread.submit(int)
    assert watchdog.look() is None
    thread.unwatch(theirs)
    ours.close()


async def test_results_that_do_not_come(thread: DeviceThread) -> None:
    """What another thread waits for is watched like a job."""
    watchdog, stuck = Watchdog(thread), Stuck()
    assert await thread.result_of(lambda: "there", "chunk", 8) == "there"
    waiting = asyncio.ensure_future(thread.result_of(stuck, "chunk", 8))
    await stuck.wait()
    assert any(looks(watchdog, FLOOR_S + LOOK_S))
    thread.give_up(Unavailable("it hangs"))
    with pytest.raises(Unavailable, match="it hangs"):
        await waiting
    stuck.release()


async def test_those_who_wait_are_told(thread: DeviceThread) -> None:
    """All who wait for jobs and all who come get the error, each one of its own; what frees memory stays queued, and
    jobs are taken again when the device is back."""
    stuck, freed = Stuck(), threading.Event()
    waiting = [thread.submit(stuck), thread.submit(int)]
    await stuck.wait()
    thread.queue(freed.set)
    thread.give_up(Unavailable("it hangs", device="cpu"))
    errors = await asyncio.gather(*waiting, thread.submit(int), return_exceptions=True)
    assert [str(error) for error in errors] == ["it hangs"] * 3
    assert len({id(error) for error in errors}) == 3
    thread.take_back()
    later = thread.submit(int)
    stuck.release()
    assert await later == 0
    assert freed.is_set()
