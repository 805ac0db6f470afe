"""What the device thread is to do soon: behind what is begun, and before it waits or takes up another job."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shard_worker.device.executor import DeviceThread


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread(1)
    yield thread
    thread.shutdown()


def put_off(thread: DeviceThread, done: list[str], *names: str) -> None:
    for name in names:
        thread.soon(done.append, name)
    done.append("begun")


def test_it_is_done_in_turn_before_the_next_job(thread: DeviceThread) -> None:
    done: list[str] = []
    holding, held = threading.Event(), threading.Event()

    def job() -> None:
        put_off(thread, done, "one", "two")
        held.set()
        # The next job waits by now.
        holding.wait(5)

    thread.queue(job)
    held.wait(5)
    following = thread.queue(lambda: [*done])
    assert done == ["begun"]
    holding.set()
    assert following.result(5) == ["begun", "one", "two"]


def test_it_is_done_before_the_thread_waits(thread: DeviceThread) -> None:
    done: list[str] = []
    waiting = threading.Event()
    thread.queue(put_off, thread, done, "one").result(5)
    thread.before_waiting(waiting.set)
    thread.queue_step(int).result(5)
    assert waiting.wait(5)
    assert done == ["begun", "one"]


def test_it_can_be_done_at_once_on_the_thread_alone(thread: DeviceThread) -> None:
    done: list[str] = []

    def job() -> list[str]:
        put_off(thread, done, "one")
        elsewhere = threading.Thread(target=thread.do_put_off)
        elsewhere.start()
        elsewhere.join(5)
        before = [*done]
        thread.do_put_off()
        return before

    assert thread.queue(job).result(5) == ["begun"]
    assert done == ["begun", "one"]


def test_an_error_keeps_none_of_the_others_from_being_done(thread: DeviceThread) -> None:
    done: list[str] = []

    def job() -> None:
        thread.soon(int, "no number")
        put_off(thread, done, "one")

    thread.queue(job).result(5)
    assert thread.queue(lambda: [*done]).result(5) == ["begun", "one"]
