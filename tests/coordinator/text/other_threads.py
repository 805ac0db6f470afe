"""Tells whether work lets other threads run: one that kept the interpreter to itself would stop every client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def turns_of_another_thread(work: Callable[[], object]) -> int:
    """Return how often another thread, which only sleeps for moments, ran while the work was done."""
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            time.sleep(0.0001)
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    while not turns:
        time.sleep(0.0001)
    before = turns
    work()
    after = turns
    done.set()
    thread.join()
    return after - before
