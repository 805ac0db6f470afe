"""The device thread while a step is expected: it stays awake for a while, and lets the step pass before other jobs."""

from __future__ import annotations

import threading
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


class StandsBy:
    """What stands by, and was let pass when nothing else ran."""

    def __init__(self, thread: DeviceThread) -> None:
        self.passed: list[tuple[int, bool]] = []
        thread.queue(thread.expect_step, self).result(5)

    def __call__(self) -> None:
        self.passed.append((threading.get_ident(), torch.is_inference_mode_enabled()))


def test_another_job_lets_it_pass_first_and_once(thread: DeviceThread) -> None:
    """On the device's thread, in inference mode."""
    stands_by = StandsBy(thread)
    assert thread.queue(lambda: len(stands_by.passed)).result(5) == 1
    assert thread.queue(lambda: len(stands_by.passed)).result(5) == 1
    assert stands_by.passed == [(thread.queue(threading.get_ident).result(5), True)]


def test_steps_find_it_standing(thread: DeviceThread) -> None:
    """However many."""
    stands_by = StandsBy(thread)
    for _ in range(3):
        assert thread.queue_step(lambda: len(stands_by.passed)).result(5) == 0
    assert thread.queue(lambda: len(stands_by.passed)).result(5) == 1


def test_what_goes_wrong_then_is_the_jobs_error(thread: DeviceThread) -> None:
    """And the thread goes on."""

    def fails() -> None:
        raise RuntimeError("the device is gone")

    thread.queue(thread.expect_step, fails).result(5)
    with pytest.raises(RuntimeError, match="the device is gone"):
        thread.queue(int).result(5)
    assert thread.queue(int).result(5) == 0


def test_the_threads_end_lets_it_pass() -> None:
    """Nothing waits on a device for a thread that is over."""
    thread = DeviceThread(1)
    own = thread.queue(threading.current_thread).result(5)
    stands_by = StandsBy(thread)
    thread.shutdown()
    own.join(5)
    assert len(stands_by.passed) == 1


def test_a_step_that_came_runs_at_once(thread: DeviceThread) -> None:
    """Where the thread has nothing else to do; behind what waits already, and from another thread, in its turn."""
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
    """Who gave it tells what went wrong."""

    def fails() -> None:
        raise ValueError("no such step")

    thread.queue(thread.step_now, fails).result(5)
    assert thread.queue(int).result(5) == 0


@pytest.mark.parametrize("awake", [True, False])
def test_jobs_are_found_awake_and_asleep(thread: DeviceThread, monkeypatch: pytest.MonkeyPatch, awake: bool) -> None:
    """While it stays awake nobody has to wake it, with few cores it sleeps: jobs run either way."""
    woken = 0
    rouse = executor._Queue._rouse

    def count(queue: executor._Queue) -> None:
        nonlocal woken
        woken += 1
        rouse(queue)

    monkeypatch.setattr(executor, "FEW_CORES", 0 if awake else 1 << 20)
    monkeypatch.setattr(executor, "AWAKE_S", 60.0)
    StandsBy(thread)
    monkeypatch.setattr(executor._Queue, "_rouse", count)
    for _ in range(20):
        assert thread.queue_step(int).result(5) == 0
    assert woken == 0 if awake else woken > 0
