"""A thread that waits for sockets, as a device thread does where there is no device."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any


class ThreadWatcher:
    """A `Watcher`. errors: what was raised on its thread, where nobody waited for it."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.ended = False
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._work)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def watch(self, made: socket.socket, ready: Callable[[], None]) -> None:
        self.do(lambda: self._selector.register(made, selectors.EVENT_READ, ready))

    def unwatch(self, made: socket.socket) -> None:
        def forget() -> None:
            self._selector.unregister(made)
            made.close()

        self.do(forget)

    def do(self, job: Callable[[], Any]) -> Future[Any]:
        """From any thread."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        self._wakes.send(b"\0")
        return future

    def call(self, job: Callable[[], Any]) -> Any:
        """Its result; not from this thread."""
        return self.do(job).result(5)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """It reads nothing meanwhile."""
        began, release = threading.Event(), threading.Event()
        self.do(lambda: (began.set(), release.wait()))
        assert began.wait(5)
        try:
            yield
        finally:
            release.set()

    def end(self) -> None:
        """Raises what was raised on the thread."""
        self.call(lambda: setattr(self, "ended", True))
        self._thread.join(5)
        self._selector.close()
        self._woken.close()
        self._wakes.close()
        if self.errors:
            raise self.errors[0]

    def _run(self) -> None:
        while not self.ended:
            for key, _ in self._selector.select():
                try:
                    key.data()
                except BaseException as error:
                    self.errors.append(error)

    def _work(self) -> None:
        self._woken.recv(1)
        future, job = self._jobs.get_nowait()
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
