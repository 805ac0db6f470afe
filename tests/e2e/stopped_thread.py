"""Stops one thread of a process, as a device does whose driver never returns, while its other threads go on (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH, _ALL = 0x4206, 0x4207, 17, 0x40000000


def device_thread(process_id: int) -> int:
    """The thread of a worker that owns its devices; waits until it has told its name."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for task in Path(f"/proc/{process_id}/task").iterdir():
            if (task / "comm").read_text().strip() == "device":
                return int(task.name)
        time.sleep(0.01)
    raise AssertionError(f"process {process_id} has no device thread")


@contextlib.contextmanager
def stopped(thread_id: int) -> Iterator[None]:
    """Hold a thread of this process's children up within the context.

    It is waited for until the thread sleeps: one that holds Python's lock would hold all others up with it.
    """
    _await_sleep(thread_id)
    _ptrace(_SEIZE, thread_id)
    try:
        _ptrace(_INTERRUPT, thread_id)
        os.waitpid(thread_id, _ALL)
        yield
    finally:
        try:
            _ptrace(_DETACH, thread_id)
        except ProcessLookupError:
            # It was killed meanwhile, and ends now that this is noted.
            os.waitpid(thread_id, _ALL)


def _await_sleep(thread_id: int) -> None:
    """Wait until a thread has been asleep for a while, at most 10 seconds."""
    deadline, asleep = time.monotonic() + 10, 0
    while asleep < 10 and time.monotonic() < deadline:
        state = Path(f"/proc/{thread_id}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.005)


def _ptrace(request: int, thread_id: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if library.ptrace(request, thread_id, None, None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
