"""The device thread while a step is expected: it stays awake for a while, and cancels the step before other jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shard_worker.device import executor
from shard_worker.device.executor import DeviceThread


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread(1)
    yield thread
    thread.shutdown()


class Prelaunched:
    """Stands for a prelaunched step: it notes on which thread, and whether in inference mode, it was cancelled."""

    def __init__(self, thread: DeviceThread) -> None:
        self.cancelled: list[tuple[int, bool]] = []
        thread.queue(thread.expect_step, self).result(5)

    def __call__(self) -> None:
        self.cancelled.append((threading.get_ident(), torch.is_inference_mode_enabled()))


def test_another_job_cancels_it_first_and_once(thread: DeviceThread) -> None:
    """The step is cancelled on the device's thread, in inference mode."""
    prelaunched = Prelaunched(thread)
    assert thread.queue(lambda: len(prelaunched.cancelled)).result(5) == 1
    assert thread.queue(lambda: len(prelaunched.cancelled)).result(5) == 1
    assert prelaunched.cancelled == [(thread.queue(threading.get_ident).result(5), True)]


def test_steps_find_it_there(thread: DeviceThread) -> None:
    """However many steps come, they do not cancel it."""
    prelaunched = Prelaunched(thread)
    for _ in range(3):
        assert thread.queue_step(lambda: len(prelaunched.cancelled)).result(5) == 0
    assert thread.queue(lambda: len(prelaunched.cancelled)).result(5) == 1


def test_an_error_of_the_cancelling_is_the_jobs(thread: DeviceThread) -> None:
    """What goes wrong while the step is cancelled fails the job before which it was, and the thread goes on."""

    def fails() -> None:
        raise RuntimeError("the device is gone")

    thread.queue(thread.expect_step, fails).result(5)
    with pytest.raises(RuntimeError, match="the device is gone"):
        thread.queue(int).result(5)
    assert thread.queue(int).result(5) == 0


def test_the_threads_end_cancels_it() -> None:
    """Nothing waits on a device for a thread that is over."""
    thread = DeviceThread(1)
    own = thread.queue(threading.current_thread).result(5)
    prelaunched = Prelaunched(thread)
    thread.shutdown()
    own.join(5)
    assert len(prelaunched.cancelled) == 1


def test_a_step_that_came_runs_at_once(thread: DeviceThread) -> None:
    """It does so where the thread has nothing else to do; behind jobs that wait, or from another thread, it waits."""
    done: list[str] = []

    def came() -> None:
        thread.step_now(done.append, "at once")
        done.append("came")
        thread.queue_step(done.append, "waits")
        thread.step_now(done.append, "behind it")
        done.append("gone")

    thread.queue(came).result(5)
    thread.queue(int).result(5)
    assert done == ["at once", "came", "gone", "waits", "behind it"]
    thread.step_now(lambda: done.append(threading.current_thread().name))
    thread.queue(int).result(5)
    assert done[-1] == "device"


def test_a_step_that_came_and_failed_leaves_the_thread_alone(thread: DeviceThread) -> None:
    """Whoever brought the step reports what went wrong; the thread goes on with the next job."""

    def fails() -> None:
        raise ValueError("no such step")

    thread.queue(thread.step_now, fails).result(5)
    assert thread.queue(int).result(5) == 0


def cpu_seconds(thread: DeviceThread) -> float:
    """Return the processor time that the thread has taken so far."""
    return thread.queue_step(time.thread_time).result(5)


def test_it_stays_awake_for_a_step(thread: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are cores enough the thread keeps looking for the step, and takes processor time for that."""
    monkeypatch.setattr(executor, "FEW_CORES", 0)
    monkeypatch.setattr(executor, "AWAKE_S", 60.0)
    Prelaunched(thread)
    before, deadline = cpu_seconds(thread), time.monotonic() + 20
    while cpu_seconds(thread) - before < 0.1:
        assert time.monotonic() < deadline
        # So long between two looks that these take next to nothing.
        time.sleep(0.05)


def test_with_few_cores_it_sleeps(thread: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others need the cores the thread takes next to no time while it waits for the step."""
    monkeypatch.setattr(executor, "FEW_CORES", 1 << 20)
    monkeypatch.setattr(executor, "AWAKE_S", 60.0)
    Prelaunched(thread)
    before, began = cpu_seconds(thread), time.monotonic()
    for _ in range(10):
        time.sleep(0.05)
        spent = cpu_seconds(thread) - before
    assert spent < (time.monotonic() - began) / 10


class Work:
    """Work that waits a number of times, and notes when it was done."""

    def __init__(self, thread: DeviceThread, name: str, done: list[str], times: int) -> None:
        self._name, self._done, self._left = name, done, times
        thread.serve(self)

    @property
    def waiting(self) -> bool:
        return self._left > 0

    def run(self) -> None:
        self._left -= 1
        self._done.append(self._name)

    def drop(self) -> None:
        self._left = 0


def test_work_of_several_kinds_is_done_in_turn(thread: DeviceThread) -> None:
    """What always has something to do keeps no other from its turn: drafts, whose contexts a long prompt's chunks
    fill one by one, did not let others' steps through until its end."""
    done: list[str] = []
    free = threading.Event()
    held = thread.queue(free.wait, 10)
    Work(thread, "drafts", done, 3)
    Work(thread, "steps", done, 3)
    free.set()
    assert held.result(5)
    thread.notice()
    end = time.monotonic() + 5
    while len(done) < 6 and time.monotonic() < end:
        time.sleep(0.001)
    assert done == ["drafts", "steps"] * 3
