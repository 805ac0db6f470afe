"""The device thread between its jobs: sockets that it reads, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest
import structlog

from services.same_host.step_socket import StepSocket
from shard_worker.device.executor import EXIT_S, DeviceThread

ROOT = Path(__file__).parents[3]


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.shutdown()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets that do not block, as sockets for steps are."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    yield pair
    for end in pair:
        end.close()


def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def its_thread(thread: DeviceThread) -> threading.Thread:
    """Return the thread on which jobs run."""
    return thread.queue(threading.current_thread).result(5)


def held(thread: DeviceThread) -> tuple[Future[bool], threading.Event]:
    """Begin a job that runs until the event is set; return its future and the event."""
    began, release = threading.Event(), threading.Event()
    running = thread.queue(lambda: (began.set(), release.wait(20))[1])
    assert began.wait(5)
    return running, release


class Reader:
    """Reads one packet a call, and notes on which threads it is called."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.packets: list[bytes] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self) -> None:
        self.threads.add(threading.current_thread())
        self.packets.append(self.end.recv(100))


# --- sockets


def test_sockets_are_read_on_the_thread(thread: DeviceThread, ends: tuple[socket.socket, socket.socket]) -> None:
    """They are read while there is no job too, and what came before a socket was watched is not lost."""
    ours, theirs = ends
    reader = Reader(ours)
    theirs.send(b"before")
    thread.watch(ours, reader)
    until(lambda: reader.packets == [b"before"])
    for number in range(100):
        theirs.send(bytes([number]))
    until(lambda: len(reader.packets) == 101)
    assert reader.packets[1:] == [bytes([number]) for number in range(100)]
    assert reader.threads == {its_thread(thread)}


def test_jobs_without_pause_do_not_starve_a_socket(
    thread: DeviceThread, ends: tuple[socket.socket, socket.socket]
) -> None:
    """A packet that comes between two of many jobs is read between them."""
    ours, theirs = ends
    reader, over, seen = Reader(ours), False, []

    def job() -> None:
        """Queue the next job, and send a packet now and then."""
        seen.append(len(reader.packets))
        if len(seen) % 100 == 0:
            theirs.send(b"step")
        if not over:
            thread.queue(job)

    thread.watch(ours, reader)
    thread.queue(job)
    until(lambda: len(reader.packets) >= 20)
    over = True
    thread.queue(lambda: None).result(5)
    # Each was read before the job behind the one that sent it.
    assert all(read == index // 100 for index, read in enumerate(seen))


def test_sockets_without_pause_do_not_starve_jobs(
    thread: DeviceThread, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Jobs run beside a socket that can always be read, and beside one at whose other end someone sends without end."""
    ours, theirs = ends
    always, other = socket.socketpair()
    calls = 0

    def ready() -> None:
        """Read nothing, so that there is always something to read."""
        nonlocal calls
        calls += 1

    def send(_: object = None) -> None:
        theirs.send(bytes(8))

    other.send(b"x")
    steps = StepSocket(ours, thread)
    steps.join(0, send)
    thread.watch(always, ready)
    send()
    for _ in range(100):
        thread.queue(lambda: None).result(5)
    assert calls >= 100
    steps.close()
    thread.unwatch(always)
    other.close()
    thread.queue(lambda: None).result(5)


def test_unwatch_closes(thread: DeviceThread, ends: tuple[socket.socket, socket.socket]) -> None:
    """The socket is not read again, and its other end sees it go; to do so twice, or without a watch, is no error."""
    ours, theirs = ends
    reader = Reader(ours)
    thread.watch(ours, reader)
    its_thread(thread)
    theirs.send(b"one")
    until(lambda: reader.packets == [b"one"])
    thread.unwatch(ours)
    its_thread(thread)
    assert ours.fileno() == -1
    assert theirs.recv(1) == b""
    thread.unwatch(ours)
    unwatched, other = socket.socketpair()
    thread.unwatch(unwatched)
    assert other.recv(1) == b""
    other.close()
    assert its_thread(thread).is_alive()
    assert reader.packets == [b"one"]


def test_a_reader_may_unwatch_its_socket(thread: DeviceThread, ends: tuple[socket.socket, socket.socket]) -> None:
    """A socket for steps does so when its other end is gone."""
    ours, theirs = ends
    steps = StepSocket(ours, thread)
    theirs.close()
    until(lambda: steps.closed and ours.fileno() == -1)
    assert its_thread(thread).is_alive()


def test_an_error_of_a_reader_costs_its_socket_only(
    thread: DeviceThread, ends: tuple[socket.socket, socket.socket]
) -> None:
    """The thread goes on, and the log says what happened."""
    ours, theirs = ends

    def ready() -> None:
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logs:
        thread.watch(ours, ready)
        theirs.send(b"x")
        until(lambda: ours.fileno() == -1)
        assert thread.queue(lambda: 7).result(5) == 7
    assert [entry["event"] for entry in logs] == ["device.socket_failed"]


# --- jobs that come from elsewhere than the event loop


def test_jobs_may_queue_jobs(thread: DeviceThread) -> None:
    """Jobs that a job queues come behind those that were there."""
    done: list[int] = []

    def job(number: int) -> None:
        done.append(number)
        if number < 100:
            thread.queue(job, number + 10)

    _, release = held(thread)
    for number in range(10):
        thread.queue(job, number)
    release.set()
    until(lambda: len(done) == 110)
    assert done == list(range(110))


def test_threads_queue_at_once(thread: DeviceThread) -> None:
    """No job is lost, whenever it comes while the thread falls asleep."""
    done: list[int] = []

    def feed() -> None:
        for number in range(500):
            thread.queue(done.append, number).result(5)

    feeders = [threading.Thread(target=feed) for _ in range(3)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join(20)
    assert sorted(done) == sorted([*range(500)] * 3)


async def test_a_cancelled_job_does_not_run(thread: DeviceThread) -> None:
    """A job can be cancelled by its future, whether a thread has queued it or an event loop."""
    done: list[str] = []
    running, release = held(thread)
    queued, submitted = thread.queue(done.append, "queued"), thread.submit(done.append, "submitted")
    last = thread.submit(done.append, "last")
    assert queued.cancel()
    assert submitted.cancel()
    await asyncio.sleep(0)
    assert not running.cancel()
    release.set()
    await last
    assert done == ["last"]


# --- its end


def test_shutdown_drops_what_has_not_begun(ends: tuple[socket.socket, socket.socket]) -> None:
    """A running job ends on its own, and the thread with it; its sockets are closed, and nothing can be queued."""
    thread, done = DeviceThread(), []
    device = its_thread(thread)
    thread.watch(ends[0], Reader(ends[0]))
    running, release = held(thread)
    waiting = [thread.queue(done.append, number) for number in range(5)]
    thread.shutdown()
    thread.shutdown()
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(RuntimeError, match="over"):
        thread.queue(done.append, 5)
    with pytest.raises(RuntimeError, match="over"):
        thread.watch(ends[1], lambda: None)
    assert device.is_alive()
    release.set()
    device.join(1)
    assert not device.is_alive()
    assert running.result(0)
    assert done == []
    assert ends[0].fileno() == -1
    thread.shutdown()
    thread.unwatch(ends[1])
    assert ends[1].fileno() == -1


@pytest.mark.parametrize("watched", [False, True])
def test_shutdown_wakes_it(ends: tuple[socket.socket, socket.socket], watched: bool) -> None:
    """A thread that waits for jobs, or for sockets too, ends at once."""
    thread = DeviceThread()
    if watched:
        thread.watch(ends[0], lambda: None)
    device = its_thread(thread)
    thread.shutdown()
    device.join(5)
    assert not device.is_alive()


def test_a_job_may_end_it() -> None:
    """Shutting down from the thread itself works as from any other."""
    thread = DeviceThread()
    device = its_thread(thread)
    thread.queue(thread.shutdown).result(5)
    device.join(1)
    assert not device.is_alive()


def test_what_is_queued_while_it_ends_is_done_or_cancelled() -> None:
    """Nobody waits for ever, whichever came first, the job or the end."""

    def feed(thread: DeviceThread, futures: list[Future[int]]) -> None:
        with contextlib.suppress(RuntimeError):
            while True:
                futures.append(thread.queue(int))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            thread, futures = DeviceThread(), []
            feeder = threading.Thread(target=feed, args=(thread, futures))
            feeder.start()
            until(lambda futures=futures: bool(futures))
            thread.shutdown()
            feeder.join(5)
            assert not feeder.is_alive()
            for future in futures:
                with contextlib.suppress(CancelledError):
                    assert future.result(1) == 0
    finally:
        sys.setswitchinterval(interval)


def test_steps_that_come_while_it_ends_do_no_harm() -> None:
    """A reader that queues a job then gets an error, which is not one of the thread."""
    for _ in range(50):
        thread = DeviceThread()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        steps = StepSocket(ours, thread)
        steps.join(0, lambda _, thread=thread: thread.queue(int))
        device = its_thread(thread)
        for _ in range(20):
            theirs.send(bytes(8))
        thread.shutdown()
        device.join(1)
        assert not device.is_alive()
        assert ours.fileno() == -1
        steps.close()
        theirs.close()


def test_a_thread_without_owner_ends() -> None:
    """The thread ends with its `DeviceThread`, though nobody called shutdown."""
    thread = DeviceThread()
    device = its_thread(thread)
    del thread
    gc.collect()
    device.join(1)
    assert not device.is_alive()


# --- the end of the process


def python(lines: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program with a device thread; return how it ended, and how many seconds after its last line."""
    program = (
        "import threading, time\nfrom shard_worker.device import executor\n"
        f"thread, began = executor.DeviceThread(), threading.Event()\n{lines}\nprint(time.time(), flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return ended, time.time() - float(ended.stdout.splitlines()[0])


LONG = "thread.queue(lambda: (began.set(), time.sleep({}), print('done', flush=True)))\nbegan.wait()"


def test_a_process_waits_for_what_runs() -> None:
    """The interpreter ends after the job that runs, as long as that does not take too long."""
    ended, took = python(LONG.format(0.5))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[1:] == ["done"]
    assert took < EXIT_S


def test_a_process_does_not_wait_for_ever() -> None:
    """The interpreter ends though a job never does, and drops those that have not begun."""
    more = "\nfor _ in range(5):\n    thread.queue(time.sleep, 60)\nexecutor.EXIT_S = 1.0"
    ended, took = python(LONG.format(60) + more)
    assert (ended.returncode, ended.stderr, ended.stdout.count("done")) == (0, "", 0)
    assert 0.9 < took < EXIT_S
