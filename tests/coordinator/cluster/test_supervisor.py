"""Watching over a cluster: lost workers are brought back, with growing pauses, and the log says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coordinator.cluster.supervisor import AWAITED_PAUSE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, supervised
from services.errors import FlashsplitError, Unavailable
from services.processes.worker_process import WorkerFailed
from tests.services.fakes import until


class FakeCluster:
    """Loses the workers that a test puts into `losses`; each restore fails with the next of `failures`, if any."""

    def __init__(self, *failures: FlashsplitError) -> None:
        self.losses: asyncio.Queue[FlashsplitError] = asyncio.Queue()
        self.failures = list(failures)
        self.restored = 0
        self.pauses_s: list[float] = []
        self.standing_by = self.replaced = 0

    async def lost(self) -> FlashsplitError:
        return await self.losses.get()

    async def replace_lost(self) -> bool:
        if not self.standing_by:
            return False
        self.standing_by -= 1
        self.replaced += 1
        return True

    async def restore(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.restored += 1

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


async def test_every_lost_worker_is_brought_back() -> None:
    """One loss after another, each restored after a short pause."""
    cluster = FakeCluster()
    async with supervised(cluster, sleep=cluster.sleep):
        for losses in (1, 2):
            cluster.losses.put_nowait(Unavailable("stage 1 is gone"))
            await until(lambda: cluster.restored == losses)  # noqa: B023
    assert cluster.pauses_s == [FIRST_PAUSE_S, FIRST_PAUSE_S]


async def test_who_stands_by_takes_a_lost_workers_place_at_once() -> None:
    """Nobody pauses or starts anything for it; once none stands by, the lost one itself is brought back."""
    cluster = FakeCluster()
    cluster.standing_by = 1
    async with supervised(cluster, sleep=cluster.sleep):
        cluster.losses.put_nowait(Unavailable("stage 1 is gone"))
        await until(lambda: cluster.replaced == 1)
        assert (cluster.restored, cluster.pauses_s) == (0, [])
        cluster.losses.put_nowait(Unavailable("stage 1 is gone"))
        await until(lambda: cluster.restored == 1)


async def test_pauses_grow_up_to_a_limit_and_begin_anew() -> None:
    """A cluster that cannot be restored is tried ever more seldom; the next loss begins with a short pause again."""
    cluster = FakeCluster(*[Unavailable("no room")] * 8)
    async with supervised(cluster, sleep=cluster.sleep):
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.restored == 1)
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.restored == 2)
    *growing, last, again = cluster.pauses_s
    assert growing[:4] == [FIRST_PAUSE_S * 2**exponent for exponent in range(4)]
    assert growing == sorted(growing)
    assert (last, again) == (LONGEST_PAUSE_S, FIRST_PAUSE_S)


async def test_a_worker_that_is_awaited_is_called_often() -> None:
    """One that does not answer may be back any moment: nobody waits half a minute for it then."""
    cluster = FakeCluster(*[Unavailable("nobody there", reason="WORKER_UNREACHABLE")] * 8)
    async with supervised(cluster, sleep=cluster.sleep):
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.restored == 1)
    assert max(cluster.pauses_s) == AWAITED_PAUSE_S


async def test_leaving_ends_the_watch() -> None:
    """Behind the context nothing is restored any more, also when it is left in the middle of a pause."""
    cluster, sleeping = FakeCluster(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        sleeping.set()
        await asyncio.Event().wait()

    async with supervised(cluster, sleep=sleep):
        cluster.losses.put_nowait(Unavailable("gone"))
        await sleeping.wait()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert cluster.restored == 0


async def test_the_log_as_a_program_reads_it(json_events: Callable[[], list[dict[str, Any]]]) -> None:
    """A dead worker's last lines stand in a field of their own as events, once; a failed restart has its own."""
    lines = ('{"level": "info", "event": "load.started"}', "Segmentation fault")
    failure = WorkerFailed("the worker for cpu exited with code 3", ["wrong program"])
    cluster = FakeCluster(failure)
    async with supervised(cluster, sleep=cluster.sleep):
        cluster.losses.put_nowait(WorkerFailed("stage 1: the worker was killed by SIGKILL", lines))
        await until(lambda: cluster.restored == 1)
    lost, failed, restored = json_events()
    assert (lost["event"], lost["level"], lost["why"]) == (
        "cluster.lost", "error", "stage 1: the worker was killed by SIGKILL",
    )  # fmt: skip
    assert lost["last_lines"] == [{"level": "info", "event": "load.started"}, "Segmentation fault"]
    assert (failed["event"], failed["why"], failed["last_lines"], failed["again_in_s"]) == (
        "cluster.restore_failed", "the worker for cpu exited with code 3", ["wrong program"], 2 * FIRST_PAUSE_S,
    )  # fmt: skip
    assert (restored["event"], restored["level"]) == ("cluster.restored", "warning")
