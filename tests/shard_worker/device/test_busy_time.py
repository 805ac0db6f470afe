"""The time in which a device had work: pieces at once count once, and what runs counts already."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shard_worker.device import busy_time
from shard_worker.device.busy_time import BusyTime
from shard_worker.device.executor import DeviceThread


def test_pieces_of_work_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100
    monkeypatch.setattr(busy_time.time, "monotonic_ns", lambda: now)
    found = BusyTime()
    read = []
    for at, happens in [
        (110, None),
        (120, found.begin),
        (130, found.begin),
        (140, found.end),
        (150, None),
        (160, found.end),
        (200, None),
        (210, found.begin),
        (211, None),
    ]:
        now = at
        if happens is None:
            read.append(found.read())
        else:
            happens()
    assert read == [(0, 10), (30, 50), (40, 100), (41, 111)]


async def test_a_thread_is_busy_while_a_job_runs_or_a_device_is_waited_for() -> None:
    """Not before, not behind, and not while jobs are none."""
    thread, go_on = DeviceThread(), threading.Event()

    def grows() -> bool:
        (first, began), (then, ended) = thread.busy_time.read(), thread.busy_time.read()
        assert ended > began
        return then > first

    async def becomes(grown: bool) -> None:
        async with asyncio.timeout(10):
            while grows() is not grown:
                await asyncio.sleep(0.001)

    await becomes(False)
    waiting = asyncio.ensure_future(thread.submit(go_on.wait))
    await becomes(True)
    go_on.set()
    await waiting
    await becomes(False)
    go_on.clear()
    elsewhere = asyncio.ensure_future(thread.result_of(go_on.wait, "step", 1))
    await becomes(True)
    go_on.set()
    await elsewhere
    assert not grows()
    with pytest.raises(ZeroDivisionError):
        await thread.submit(lambda: 1 // 0)
    await becomes(False)
    thread.shutdown()
