"""The one thread that owns a worker's devices. Async code awaits it and never computes.

Jobs run in the order in which they were submitted, so a commit that was submitted before a forward is applied before
it. Between jobs, and while there is none, the thread reads the sockets on which steps come to it directly. Where a step
is expected on a GPU, the thread does not sleep for a while, and the step may be prelaunched there; every job that is no
step cancels it first.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import structlog
import torch

from services.errors import OUT_OF_MEMORY, FlashsplitError, ResourceExhausted, Unavailable
from shard_worker.device.busy_time import BusyTime
from shard_worker.device.watchdog import FIRST_S, StepCosts, Work

T = TypeVar("T")

log = structlog.get_logger()

AWAKE_S = 0.02
"""How long the thread looks for an expected step without sleeping: waking takes some 50 µs, and a core that has slept
runs Python at half its speed."""

FEW_CORES = 4
"""With fewer cores than this the thread always sleeps: others need the core."""

SWITCH_S = 0.00005
"""The longest time that one of the process's threads waits for Python's lock while another one has it: this one comes
back to it many times in a step. Two GPUs with 64 clients get 7 % more tokens/s by it than with ten times as long."""

BROKEN = "DEVICE_BROKEN"
"""The reason of the error after which a GPU can do nothing more in this process."""

EXIT_S = 5.0
"""How long the end of the interpreter waits for a job that runs."""


class BatchedWork(Protocol):
    """Work of one kind that is done together with what waits beside it, when the thread comes to it."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to do."""

    def run(self) -> None:
        """Do what waits, or a part of it. Whoever waits for it hears of errors, of which one is raised as well."""

    def drop(self) -> None:
        """Cancel what waits: the thread is over."""


@contextlib.contextmanager
def raising_first() -> Iterator[list[Exception]]:
    """Give a list for errors of work that goes on behind them, and raise the first of them behind all of it."""
    errors: list[Exception] = []
    yield errors
    try:
        if errors:
            raise errors[0]
    finally:
        # Their tracebacks lead to frames that know the list: it would keep them, and all that these frames know.
        errors.clear()


class DeviceThread:
    """Runs jobs one after the other on a thread of its own."""

    def __init__(self, threads: int | None = None, on_broken: Callable[[], None] = lambda: None) -> None:
        """Start the thread.

        threads: intra-op threads of torch on the CPU, None for torch's default. on_broken: called on the thread when a
        GPU can do nothing more in this process.
        """
        self._queue = _Queue(on_broken)
        self._hung: FlashsplitError | None = None
        self._awaited = set[asyncio.Future[Any]]()
        self._elsewhere = list[Work]()
        self._thread = threading.Thread(target=self._queue.run, args=(threads,), name="device", daemon=True)
        self._thread.start()
        # Also where nobody calls shutdown: what runs in torch must not outlive the interpreter.
        weakref.finalize(self, _end, self._queue, self._thread)

    def submit(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queue a job, from an event loop.

        Returns a future for its result or its error, or for that of `give_up` if that comes first.
        """
        return self._submit(job, args, step=False)

    def submit_long(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queue a job as `submit` does, which may take as long as it likes, such as a load."""
        return self._submit(job, args, step=False, allowed_s=None)

    def queue(self, job: Callable[..., T], *args: object) -> Future[T]:
        """Queue a job, from any thread; a job may queue others, which come behind it.

        Returns a future for its result or its error. Raises RuntimeError when the thread has ended.
        """
        return self._put(job, args, step=False)

    def submit_step(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queue a step, as `submit` does: it does not cancel a step that was prelaunched."""
        return self._submit(job, args, step=True)

    def queue_step(self, job: Callable[..., T], *args: object) -> Future[T]:
        """Queue a step, as `queue` does: it does not cancel a step that was prelaunched."""
        return self._put(job, args, step=True)

    @property
    def busy(self) -> bool:
        """Whether jobs wait that have not begun."""
        return self._queue.busy

    @property
    def busy_time(self) -> BusyTime:
        """How much of its time the thread, or a device that another thread waits for, was at work."""
        return self._queue.busy_time

    @property
    def has_jobs(self) -> bool:
        """Whether jobs wait that are done one by one."""
        return self._queue.has_jobs

    # --- work that is done together

    def serve(self, work: BatchedWork) -> None:
        """Do from now on what waits there, in turn with other such work: behind the jobs that wait, but for those that
        compute rows, between which it comes in turn. To be called before something waits."""
        self._queue.batched += (work,)

    def notice(self) -> None:
        """Notice that something waits there; from any thread. Raises RuntimeError when the thread is over."""
        self._queue.notice()

    def before_waiting(self, act: Callable[[], object]) -> None:
        """Have something done on the thread each time before it waits, for a device or for something to do: what wakes
        another thread of the process takes Python's lock from this one. To be called before something waits. act: must
        not raise."""
        self._queue.before_waiting.append(act)

    def about_to_wait(self) -> None:
        """Do what is to be done before the thread waits; to be called on the thread itself."""
        self._queue.about_to_wait()

    def soon(self, job: Callable[..., object], *args: object) -> None:
        """Do something on the thread before it waits or takes up another job, but behind what is begun meanwhile: the
        device, or another stage, need not wait for it. To be called on the thread itself."""
        self._queue.put_off.append(functools.partial(job, *args))

    def do_put_off(self) -> None:
        """Do now what is to be done soon; on any other thread nothing."""
        if threading.current_thread() is self._thread:
            self._queue.do_put_off()

    def awaited(self, queued: Future[T]) -> asyncio.Future[T]:
        """Return a future of the event loop for the result or error of what was queued; errors as in `submit`."""
        future: asyncio.Future[T] = self._expected()
        return future if future.done() else self._passed_on(future, queued)

    # --- steps that are expected

    def expect_step(self, cancel: Callable[[], None]) -> None:
        """Stay awake for a while, because a step will soon come to a GPU; to be called on the thread itself.

        cancel: called before the next job that is no step.
        """
        self._queue.expect_step(cancel)

    def step_now(self, job: Callable[..., object], *args: object, begun: bool = False) -> None:
        """Run a step that a socket brought: at once on the thread itself, behind the jobs that wait where there are
        any, or from another thread. The job has to report its own errors.

        begun: the device has begun with the step already, at a time when no job waited; it runs before those that have
        come meanwhile.
        """
        if (self._queue.busy and not begun) or threading.current_thread() is not self._thread:
            self.queue_step(job, *args)
        else:
            self._queue.run_now(functools.partial(job, *args))

    # --- noticing that it hangs

    def computes(self, kind: str, rows: int) -> None:
        """Say that the job that runs is a step of this kind and of so many rows; to be called on the thread itself."""
        self._queue.computes(kind, rows)

    async def result_of(self, wait: Callable[[], T], kind: str, rows: int) -> T:
        """Wait on another thread for what a step of this kind leaves on the device. Errors as in `submit`."""
        work = Work()
        self._queue.costs.expect(work, kind, rows)
        self._elsewhere.append(work)
        self.busy_time.begin()
        try:
            result: asyncio.Future[T] = self._expected()
            waiting = asyncio.ensure_future(asyncio.to_thread(wait))
            waiting.add_done_callback(functools.partial(_pass_on, result))
            value = await result
            self._queue.costs.ended(work)
            return value
        finally:
            self.busy_time.end()
            self._elsewhere.remove(work)

    def give_up(self, error: FlashsplitError) -> None:
        """Let all who wait for jobs, and all who come, have this error instead.

        What was queued stays so, as it may be needed to free what others hold.
        """
        self._hung = error
        for future in [*self._awaited]:
            if not future.done():
                future.set_exception(error.copied())

    def take_back(self) -> None:
        """Take jobs again."""
        self._hung = None

    @property
    def works(self) -> list[Work]:
        work = self._queue.work
        return [*([] if work is None else [work]), *self._elsewhere]

    @property
    def unheeded(self) -> bool:
        return self._queue.busy and self._queue.work is None

    @property
    def done_count(self) -> int:
        return self._queue.done_count

    def probe(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.queue_step(int)

    # ---

    def _put(
        self, job: Callable[..., T], args: tuple[object, ...], *, step: bool, allowed_s: float | None = FIRST_S
    ) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put(_Job(future, functools.partial(job, *args), step, allowed_s))
        return future

    def _submit(
        self, job: Callable[..., T], args: tuple[object, ...], *, step: bool, allowed_s: float | None = FIRST_S
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._expected()
        if future.done():
            return future
        return self._passed_on(future, self._put(job, args, step=step, allowed_s=allowed_s))

    @staticmethod
    def _passed_on(future: asyncio.Future[T], queued: Future[T]) -> asyncio.Future[T]:
        """Give the future what comes of the queued one; who cancels the former cancels the latter."""
        loop = future.get_loop()

        def on_done(done: Future[T]) -> None:
            # The loop may be over, and with it who would want to know. A job that its own callback referred to would
            # keep its result, maybe a session's memory, until cycles are looked for.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_pass_on, future, done)

        queued.add_done_callback(on_done)
        future.add_done_callback(lambda future: queued.cancel() if future.cancelled() else None)
        return future

    def _expected(self) -> asyncio.Future[Any]:
        """Return a future that gets the error of `give_up`, unless it has a result before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._hung is not None:
            future.set_exception(self._hung.copied())
        else:
            self._awaited.add(future)
            future.add_done_callback(self._awaited.discard)
        return future

    def watch(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` on the thread whenever the socket has something to read; from any thread."""
        self.queue_step(self._queue.watch, connection, on_readable)

    def unwatch(self, connection: socket.socket) -> None:
        """Stop watching the socket, and close it; from any thread."""
        if self._queue.over:
            connection.close()
        else:
            self.queue_step(self._queue.unwatch, connection)

    def shutdown(self) -> None:
        """Drop the jobs that have not begun; one that runs ends on its own. Safe to call twice."""
        self._queue.end()


@dataclass(frozen=True, slots=True)
class _Job:
    """A queued job.

    step: it may find a prelaunched step, and does not cancel it. allowed_s: how long it may take, as of `Work`.
    """

    future: Future[Any]
    run: Callable[[], Any]
    step: bool
    allowed_s: float | None


class _Queue:
    """The thread's side of the queue. It does not refer to its `DeviceThread`, which can be freed while it runs."""

    def __init__(self, on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._jobs: deque[_Job] = deque()
        self.batched: tuple[BatchedWork, ...] = ()
        """In turn: what was done last comes last."""
        self.before_waiting: list[Callable[[], object]] = []
        self.put_off: deque[Callable[[], object]] = deque()
        """What is to be done soon, in turn."""
        self._has_computed = False
        """Whether the last job has computed rows."""
        self._selector = selectors.DefaultSelector()
        # A byte sent into one end wakes the thread, which waits for the other one.
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._read_wakes)
        self._watched_count = 0
        self._cancel_prelaunched: Callable[[], None] | None = None
        self._awake_until = 0.0
        self._asleep = self.over = False
        self.costs = StepCosts()
        self.busy_time = BusyTime()
        self.work: Work | None = None
        """The job that runs now."""
        self.done_count = 0

    @property
    def busy(self) -> bool:
        return bool(self._jobs) or self._waiting is not None

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    @property
    def _waiting(self) -> BatchedWork | None:
        return next((work for work in self.batched if work.waiting), None)

    def notice(self) -> None:
        if self.over:
            self._drop_jobs()
            raise RuntimeError("the device thread is over")
        if self._asleep:
            self._wake()

    def put(self, job: _Job) -> None:
        """Raises RuntimeError when the thread is over."""
        if self.over:
            raise RuntimeError("the device thread is over")
        self._jobs.append(job)
        if self._asleep:
            self._wake()
        if self.over:
            # It ended meanwhile, and may have dropped the others before this one came.
            self._drop_jobs()

    def expect_step(self, cancel: Callable[[], None]) -> None:
        self._cancel_prelaunched = cancel
        if looks_without_sleep():
            self._awake_until = time.monotonic() + AWAKE_S

    def end(self) -> None:
        self.over = True
        self._drop_jobs()
        self._wake()

    def watch(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        self._selector.register(connection, selectors.EVENT_READ, on_readable)
        self._watched_count += 1

    def unwatch(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
            self._watched_count -= 1
        connection.close()

    def run(self, threads: int | None) -> None:
        """Run jobs until the queue ends; arguments as of `DeviceThread`."""
        sys.setswitchinterval(SWITCH_S)
        if threads:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            self._run()

    def about_to_wait(self) -> None:
        self.do_put_off()
        for act in self.before_waiting:
            act()

    def do_put_off(self) -> None:
        while self.put_off:
            try:
                self.put_off.popleft()()
            except Exception as error:
                # Whose it is ends by itself, or is over; the others go on.
                log.error("device.put_off_failed", exc_info=self._device_error(error))

    def run_now(self, run: Callable[[], object]) -> None:
        """Run a job at once; on the thread."""
        self._note_begin(Work())
        try:
            run()
        except Exception as error:
            self._device_error(error)
        finally:
            self._note_end()

    def computes(self, kind: str, rows: int) -> None:
        if self.work is not None:
            self.costs.expect(self.work, kind, rows)

    def _note_begin(self, work: Work) -> None:
        self.work = work
        self.busy_time.begin()

    def _note_end(self) -> None:
        self.busy_time.end()
        work, self.work = self.work, None
        self._has_computed = work is not None and work.like is not None
        self.done_count += 1
        if work is not None:
            self.costs.ended(work)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            # For those who look at the process's threads.
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("device")
        while not self.over:
            if not self.busy:
                self.about_to_wait()
            if not self.busy and time.monotonic() < self._awake_until:
                self._read(0)
            elif not self.busy:
                # A job that is put behind the next line wakes this thread; one that was put before is seen after it.
                self._asleep = True
                self._read(0 if self.busy or self.over else None)
                self._asleep = False
            elif self._watched_count:
                self._read(0)
            self._run_next()
        with contextlib.suppress(RuntimeError):
            self._cancel()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake_writer.close()

    def _run_next(self) -> None:
        waiting = self._waiting
        if waiting is not None and (self._has_computed or not self._jobs):
            self.batched = (*(work for work in self.batched if work is not waiting), waiting)
            self.run_now(waiting.run)
            # What computes rows in a job has its turn now.
            self._has_computed = False
            return
        self.do_put_off()
        try:
            job = self._jobs.popleft()
        except IndexError:
            return
        if not job.future.set_running_or_notify_cancel():
            return
        self._note_begin(Work(job.allowed_s))
        try:
            if not job.step:
                self._cancel()
            result = job.run()
        except BaseException as error:
            self._note_end()
            job.future.set_exception(self._device_error(error))
            # The error refers to this frame, and so to itself by the job.
            del job
        else:
            self._note_end()
            job.future.set_result(result)

    def _device_error(self, error: BaseException) -> BaseException:
        """Return what the error means, after having reported a GPU that is broken."""
        error = device_error(error)
        if isinstance(error, Unavailable) and error.reason == BROKEN:
            self._on_broken()
        return error

    def _cancel(self) -> None:
        """Cancel the prelaunched step, if there is one, and expect none."""
        self._awake_until = 0.0
        cancel, self._cancel_prelaunched = self._cancel_prelaunched, None
        if cancel is not None:
            cancel()

    def _read(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            try:
                key.data()
            except Exception:
                # The thread goes on, or every session would wait for ever. While it ends, what comes cannot be queued.
                if not self.over:
                    log.exception("device.socket_failed")
                self.unwatch(cast(socket.socket, key.fileobj))

    def _drop_jobs(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._jobs.popleft().future.cancel()
        for work in self.batched:
            work.drop()

    def _wake(self) -> None:
        # The thread is awake where the socket is full, and over where it is closed.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _read_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)


def looks_without_sleep() -> bool:
    """Return whether the thread may look for what comes without sleeping: whether others have cores enough."""
    return len(os.sched_getaffinity(0)) >= FEW_CORES


def _pass_on(future: asyncio.Future[T], source: asyncio.Future[T] | Future[T]) -> None:
    """Give a future the result or error of another one, unless it has one."""
    if source.cancelled():
        future.cancel()
    elif (error := source.exception()) is not None:
        if not future.done():
            future.set_exception(error)
    elif not future.done():
        future.set_result(source.result())


def _end(queue: _Queue, thread: threading.Thread) -> None:
    queue.end()
    if thread is not threading.current_thread():
        thread.join(EXIT_S)


def device_error(error: BaseException) -> BaseException:
    """Return what an error of torch means: ResourceExhausted where memory ran out, Unavailable where the device can do
    nothing more; otherwise the error itself.

    A FlashsplitError comes without its traceback: who keeps it would keep by it what a failed step had on the device.
    """
    meaning = _meaning_of(error)
    if isinstance(meaning, FlashsplitError):
        meaning.__cause__ = meaning.__context__ = None
        meaning.__traceback__ = None
    return meaning


def _meaning_of(error: BaseException) -> BaseException:
    if not isinstance(error, RuntimeError):
        return error
    # The CPU's allocators have no exception of their own. The plain one's sentence comes behind a place in torch's
    # sources, that of page-locked memory is CUDA's.
    place, cpu_allocator, rest = str(error).partition("DefaultCPUAllocator")
    page_locked = place.startswith(("CUDA error: out of memory", "HIP error: out of memory"))
    meaning: FlashsplitError
    if isinstance(error, torch.OutOfMemoryError) or cpu_allocator or page_locked:
        line = (cpu_allocator + rest if cpu_allocator else place).partition("\n")[0]
        # The second sentence says of what size, unlike those behind it, which are about torch.
        sentence = ". ".join(
            line.split(". ")[:2] if isinstance(error, torch.OutOfMemoryError) else [line.partition(".")[0]]
        )
        meaning = ResourceExhausted(
            f"the device has no memory left: {sentence}; give this stage fewer layers or use a shorter context",
            reason=OUT_OF_MEMORY,
        )
    elif isinstance(error, torch.AcceleratorError) and _is_broken():
        meaning = Unavailable(
            f"the device can do nothing more in this worker, which therefore ends: {place.partition(chr(10))[0]}",
            reason=BROKEN,
        )
    else:
        return error
    return meaning


def _is_broken() -> bool:
    """Return whether every call to the GPU fails from now on, as after a fault in a kernel."""
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return True
    return False
