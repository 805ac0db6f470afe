"""The one thread that owns a worker's devices. Async code awaits it and never computes.

Jobs run in the order in which they were submitted, so a commit that was submitted before a forward is applied before
it. Between jobs, and while there is none, the thread reads the sockets on which steps come to it directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import structlog
import torch

from services.errors import ResourceExhausted

T = TypeVar("T")

log = structlog.get_logger()

EXIT_S = 5.0
"""How long the interpreter's end waits for a job that runs."""


class DeviceThread:
    """Runs jobs one after the other. `threads`: intra-op threads on the CPU, None for torch's default."""

    def __init__(self, threads: int | None = None) -> None:
        self._queue = _Queue()
        self._thread = threading.Thread(target=self._queue.run, args=(threads,), name="device", daemon=True)
        self._thread.start()
        # Also where nobody calls shutdown: what runs in torch must not outlive the interpreter.
        weakref.finalize(self, _end, self._queue, self._thread)

    def submit(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queue a job now; await the future for its result."""
        return asyncio.wrap_future(self.queue(job, *args))

    def queue(self, job: Callable[..., T], *args: object) -> Future[T]:
        """As `submit`, from any thread; a job may queue what comes behind it."""
        future: Future[T] = Future()
        self._queue.put(future, functools.partial(_in_inference_mode, job, *args))
        return future

    def watch(self, made: socket.socket, ready: Callable[[], None]) -> None:
        """From any thread: call `ready` here whenever the socket has something to read."""
        self.queue(self._queue.watch, made, ready)

    def unwatch(self, made: socket.socket) -> None:
        """From any thread: no more, and close the socket."""
        if self._queue.over:
            made.close()
        else:
            self.queue(self._queue.unwatch, made)

    def shutdown(self) -> None:
        """Drop what has not begun; what runs ends on its own. Safe to call twice."""
        self._queue.end()


class _Queue:
    """The thread's side. Knows nothing of `DeviceThread`, which therefore can be forgotten while it runs."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self._sockets = 0
        self._asleep = self.over = False

    def put(self, future: Future[Any], job: Callable[[], Any]) -> None:
        """Raises RuntimeError when the thread is over."""
        if self.over:
            raise RuntimeError("the device thread is over")
        self._jobs.append((future, job))
        if self._asleep:
            self._rouse()
        if self.over:
            # It ended meanwhile, and may have dropped the others before this one came.
            self._drop()

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
        while not self.over:
            if not self._jobs:
                # Who puts a job behind the next line wakes this thread, who did so before it is seen behind it.
                self._asleep = True
                self._read(0 if self._jobs or self.over else None)
                self._asleep = False
            elif self._sockets:
                self._read(0)
            self._run_next()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wakes.close()

    def _run_next(self) -> None:
        try:
            future, job = self._jobs.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

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
                self._jobs.popleft()[0].cancel()

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


def _in_inference_mode(job: Callable[..., T], *args: object) -> T:
    try:
        with torch.inference_mode():
            return job(*args)
    except RuntimeError as error:
        # The CPU's allocators have no exception of their own. The plain one's sentence comes behind a place in torch's
        # sources, that of page-locked memory is CUDA's.
        place, cpu_allocator, rest = str(error).partition("DefaultCPUAllocator")
        page_locked = place.startswith(("CUDA error: out of memory", "HIP error: out of memory"))
        if isinstance(error, torch.OutOfMemoryError) or cpu_allocator or page_locked:
            sentence = (cpu_allocator + rest if cpu_allocator else place).partition("\n")[0].partition(".")[0]
            raise ResourceExhausted(
                f"the device has no memory left: {sentence}; give this stage fewer layers or use a shorter context",
                reason="OUT_OF_MEMORY",
            ) from error
        raise
