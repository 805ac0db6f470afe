"""The one thread that owns a worker's devices. Async code awaits it and never computes.

Jobs run in the order in which they were submitted, so a commit that was submitted before a forward is applied before
it. Between jobs, and while there is none, the thread reads the sockets on which steps come to it directly. Where one is
expected on a GPU the thread does not sleep for a while, and the step may stand by there, launched before its numbers
are known: every job but steps lets it pass first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
import torch

from services.errors import FlashsplitError, ResourceExhausted, Unavailable

T = TypeVar("T")

log = structlog.get_logger()

AWAKE_S = 0.02
"""How long the thread looks for an expected step without sleeping: to wake takes some 50 µs, and a core that slept runs
Python at half its speed."""

FEW_CORES = 4
"""With fewer the thread sleeps: others need the core."""

SWITCH_S = 0.0005
"""How long other threads wait for Python's lock at most while this one does not sleep."""

BROKEN = "DEVICE_BROKEN"

EXIT_S = 5.0
"""How long the interpreter's end waits for a job that runs."""


class DeviceThread:
    """Runs jobs one after the other.

    `threads`: intra-op threads on the CPU, None for torch's default. on_broken: called there when a GPU can do nothing
    more in this process.
    """

    def __init__(self, threads: int | None = None, on_broken: Callable[[], None] = lambda: None) -> None:
        self._queue = _Queue(on_broken)
        self._thread = threading.Thread(target=self._queue.run, args=(threads,), name="device", daemon=True)
        self._thread.start()
        # Also where nobody calls shutdown: what runs in torch must not outlive the interpreter.
        weakref.finalize(self, _end, self._queue, self._thread)

    def submit(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queue a job now; await the future for its result."""
        return asyncio.wrap_future(self.queue(job, *args))

    def queue(self, job: Callable[..., T], *args: object) -> Future[T]:
        """As `submit`, from any thread; a job may queue what comes behind it."""
        return self._put(job, args, step=False)

    def submit_step(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """As `submit`, for what may find a step standing by."""
        return asyncio.wrap_future(self.queue_step(job, *args))

    def queue_step(self, job: Callable[..., T], *args: object) -> Future[T]:
        """As `submit_step`, from any thread."""
        return self._put(job, args, step=True)

    @property
    def busy(self) -> bool:
        """Whether jobs wait."""
        return self._queue.busy

    def expect_step(self, stand_down: Callable[[], None]) -> None:
        """On this thread: a step will soon come to a GPU. stand_down: called before the next job that is no step."""
        self._queue.expect_step(stand_down)

    def step_now(self, job: Callable[..., object], *args: object, begun: bool = False) -> None:
        """For a step that a socket brought: on the thread itself, at once where nothing waits, behind that else. What
        goes wrong is the job's to tell.

        begun: the device has begun with it already, when nothing waited; what came meanwhile comes behind it.
        """
        if (self._queue.busy and not begun) or threading.current_thread() is not self._thread:
            self.queue_step(job, *args)
        else:
            self._queue.run_now(functools.partial(job, *args))

    def _put(self, job: Callable[..., T], args: tuple[object, ...], *, step: bool) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put(_Job(future, functools.partial(job, *args), step))
        return future

    def watch(self, made: socket.socket, ready: Callable[[], None]) -> None:
        """From any thread: call `ready` here whenever the socket has something to read."""
        self.queue_step(self._queue.watch, made, ready)

    def unwatch(self, made: socket.socket) -> None:
        """From any thread: no more, and close the socket."""
        if self._queue.over:
            made.close()
        else:
            self.queue_step(self._queue.unwatch, made)

    def shutdown(self) -> None:
        """Drop what has not begun; what runs ends on its own. Safe to call twice."""
        self._queue.end()


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    run: Callable[[], Any]
    step: bool


class _Queue:
    """The thread's side. Knows nothing of `DeviceThread`, which therefore can be forgotten while it runs."""

    def __init__(self, on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._jobs: deque[_Job] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self._sockets = 0
        self._stand_down: Callable[[], None] | None = None
        self._awake_until = 0.0
        self._asleep = self.over = False

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def put(self, job: _Job) -> None:
        """Raises RuntimeError when the thread is over."""
        if self.over:
            raise RuntimeError("the device thread is over")
        self._jobs.append(job)
        if self._asleep:
            self._rouse()
        if self.over:
            # It ended meanwhile, and may have dropped the others before this one came.
            self._drop()

    def expect_step(self, stand_down: Callable[[], None]) -> None:
        self._stand_down = stand_down
        if len(os.sched_getaffinity(0)) >= FEW_CORES:
            sys.setswitchinterval(SWITCH_S)
            self._awake_until = time.monotonic() + AWAKE_S

    def end(self) -> None:
        self.over = True
        self._drop()
        self._rouse()

    def watch(self, made: socket.socket, ready: Callable[[], None]) -> None:
        self._selector.register(made, selectors.EVENT_READ, ready)
        self._sockets += 1

    def unwatch(self, made: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(made)
            self._sockets -= 1
        made.close()

    def run(self, threads: int | None) -> None:
        if threads:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            self._run()

    def run_now(self, run: Callable[[], object]) -> None:
        """On the thread."""
        try:
            run()
        except Exception as error:
            self._meant(error)

    def _run(self) -> None:
        while not self.over:
            if not self._jobs and time.monotonic() < self._awake_until:
                self._read(0)
            elif not self._jobs:
                # Who puts a job behind the next line wakes this thread, who did so before it is seen behind it.
                self._asleep = True
                self._read(0 if self._jobs or self.over else None)
                self._asleep = False
            elif self._sockets:
                self._read(0)
            self._run_next()
        with contextlib.suppress(RuntimeError):
            self._let_pass()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wakes.close()

    def _run_next(self) -> None:
        try:
            job = self._jobs.popleft()
        except IndexError:
            return
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            if not job.step:
                self._let_pass()
            result = job.run()
        except BaseException as error:
            job.future.set_exception(self._meant(error))
        else:
            job.future.set_result(result)

    def _meant(self, error: BaseException) -> BaseException:
        error = device_error(error)
        if isinstance(error, Unavailable) and error.reason == BROKEN:
            self._on_broken()
        return error

    def _let_pass(self) -> None:
        self._awake_until = 0.0
        stand_down, self._stand_down = self._stand_down, None
        if stand_down is not None:
            stand_down()

    def _read(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            try:
                key.data()
            except Exception:
                # The thread goes on, or every session would wait for ever. While it ends, what comes cannot be queued.
                if not self.over:
                    log.exception("device.socket_failed")
                self.unwatch(cast(socket.socket, key.fileobj))

    def _drop(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._jobs.popleft().future.cancel()

    def _rouse(self) -> None:
        # It is awake where there is no room, and over where the socket is closed.
        with contextlib.suppress(OSError):
            self._wakes.send(b"\0")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)


def _end(queue: _Queue, thread: threading.Thread) -> None:
    queue.end()
    if thread is not threading.current_thread():
        thread.join(EXIT_S)


def device_error(error: BaseException) -> BaseException:
    """What torch raised, as ResourceExhausted or Unavailable where that is what it means; else the error itself."""
    if not isinstance(error, RuntimeError):
        return error
    # The CPU's allocators have no exception of their own. The plain one's sentence comes behind a place in torch's
    # sources, that of page-locked memory is CUDA's.
    place, cpu_allocator, rest = str(error).partition("DefaultCPUAllocator")
    page_locked = place.startswith(("CUDA error: out of memory", "HIP error: out of memory"))
    meant: FlashsplitError
    if isinstance(error, torch.OutOfMemoryError) or cpu_allocator or page_locked:
        sentence = (cpu_allocator + rest if cpu_allocator else place).partition("\n")[0].partition(".")[0]
        meant = ResourceExhausted(
            f"the device has no memory left: {sentence}; give this stage fewer layers or use a shorter context",
            reason="OUT_OF_MEMORY",
        )
    elif isinstance(error, torch.AcceleratorError) and _broken():
        meant = Unavailable(
            f"the device can do nothing more in this worker, which therefore ends: {place.partition(chr(10))[0]}",
            reason=BROKEN,
        )
    else:
        return error
    meant.__cause__ = error
    return meant


def _broken() -> bool:
    """Whether every call to the GPU fails from now on, as after a fault in a kernel."""
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return True
    return False
