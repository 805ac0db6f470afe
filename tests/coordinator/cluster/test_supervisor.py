"""Watching over a cluster: lost workers are brought back, with growing pauses, and the log says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from coordinator.cluster import supervisor
from coordinator.cluster.supervisor import (
    AWAITED_PAUSE_S,
    FIRST_PAUSE_S,
    LEAST_CALL_S,
    LONGEST_PAUSE_S,
    supervised,
)
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
        self.calls_s: list[float | None] = []
        self.standing_by = self.replaced = 0
        self.now_s = 0.0
        self.has_room = True
        self.degraded: str | None = None
        self.can_rejoin = self.comes_back = False
        self.rejoined = 0

    async def lost(self) -> FlashsplitError:
        return await self.losses.get()

    async def replace_lost(self) -> bool:
        if not self.standing_by:
            return False
        self.standing_by -= 1
        self.replaced += 1
        return True

    async def restore(self, within_s: float | None = None) -> None:
        self.calls_s.append(within_s)
        if self.failures:
            raise self.failures.pop(0)
        self.restored += 1

    async def resplit(self) -> bool:
        self.degraded = "two of three" if self.has_room else None
        return self.has_room

    async def rejoin(self) -> bool:
        self.degraded, self.can_rejoin = None, False
        self.rejoined += 1
        return self.comes_back

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds

    def clock(self) -> float:
        """A time at which only pauses have passed."""
        return self.now_s


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
    cluster = FakeCluster(*[Unavailable("no room")] * 10)
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


async def test_a_lost_worker_is_called_no_longer_than_until_others_take_over() -> None:
    """But for a second at least, so that one that is back is found."""
    cluster = FakeCluster(*[Unavailable("nobody there", reason="WORKER_UNREACHABLE")] * 4)
    cluster.has_room = False
    async with supervised(cluster, replace_after_s=1.6, sleep=cluster.sleep, clock=cluster.clock):
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.restored == 1)
    # Pauses of 0.1, 0.2, 0.4, 0.8 and 1.6 s passed before.
    assert cluster.calls_s == pytest.approx([1.5, 1.3, LEAST_CALL_S, LEAST_CALL_S, LEAST_CALL_S])


GONE = Unavailable("nobody there", reason="WORKER_UNREACHABLE")


async def test_layers_are_split_anew_where_a_worker_does_not_come_back() -> None:
    """Not before its time, and not where the others have no room: then it is called on."""
    cluster = FakeCluster(*[GONE] * 9)
    watched = supervised(cluster, replace_after_s=3.0, sleep=cluster.sleep, clock=cluster.clock)
    async with watched:
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.degraded is not None)
        assert cluster.pauses_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
        assert (cluster.restored, len(cluster.failures)) == (0, 4)
        cluster.has_room = False
        cluster.losses.put_nowait(Unavailable("stage 0 is gone too"))
        await until(lambda: cluster.restored == 1)
        assert cluster.failures == []


@pytest.mark.parametrize("comes_back", [True, False])
async def test_layers_go_back_while_nothing_runs(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker is there again, and nobody asks anything; a loss while that is waited for is told at once. What
    goes wrong then is mended like a loss."""
    monkeypatch.setattr(supervisor, "REJOIN_LOOK_S", 0.0)
    cluster, asked, quiet, left = FakeCluster(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    cluster.degraded, cluster.comes_back = "two of three", comes_back

    @contextlib.asynccontextmanager
    async def until_quiet() -> AsyncIterator[None]:
        asked.set()
        await quiet.wait()
        yield
        left.set()

    async with supervised(cluster, quiet=until_quiet, sleep=cluster.sleep):
        cluster.can_rejoin = True
        await asked.wait()
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.restored == 1)
        assert (cluster.rejoined, left.is_set()) == (0, False)
        quiet.set()
        await until(left.is_set)
        assert cluster.rejoined == 1
        if not comes_back:
            await until(lambda: cluster.restored == 2)
        cluster.losses.put_nowait(Unavailable("stage 0 is gone"))
        await until(lambda: cluster.restored == 3 - comes_back)


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
