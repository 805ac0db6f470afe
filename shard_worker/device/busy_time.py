"""How much of its time a device was at work: when anything of its work ran, however many pieces at once."""

from __future__ import annotations

import threading
import time


class BusyTime:
    """Counts from when it is made. Work may begin and end on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made_ns = time.monotonic_ns()
        self._running = self._since_ns = self._busy_ns = 0

    def begin(self) -> None:
        """A piece of work begins."""
        with self._lock:
            if not self._running:
                self._since_ns = time.monotonic_ns()
            self._running += 1

    def end(self) -> None:
        """A piece of work has ended."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self._busy_ns += time.monotonic_ns() - self._since_ns

    def read(self) -> tuple[int, int]:
        """Return for how many nanoseconds there was work, that which runs included, and of how many."""
        with self._lock:
            now_ns = time.monotonic_ns()
            running_ns = now_ns - self._since_ns if self._running else 0
            return self._busy_ns + running_ns, now_ns - self._made_ns
