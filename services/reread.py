"""Content of files that is read again when one of them changes, or when the process is told to with SIGHUP.

Nobody waits for a change: whoever asks for the content has the files looked at first. Files that cannot be used are
logged, and what they held before stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from services.errors import FlashsplitError

T = TypeVar("T")

log = structlog.get_logger()

_of_this_process: weakref.WeakSet[Reread[Any]] = weakref.WeakSet()
"""All that were read from files: a signal is for the process."""


class Reread(Generic[T]):
    """What some files hold. Any thread may ask for it."""

    def __init__(self, files: Iterable[Path], read: Callable[[], T]) -> None:
        """read: reads and checks the files, now and later; raises FlashsplitError for those that cannot be used.

        Raises what `read` raises. Without files the content never changes.
        """
        self._files, self._read = tuple(files), read
        self._lock = threading.Lock()
        # Before they are read: what changes meanwhile is read once more.
        self._state = self._look()
        self._content = read()
        if self._files:
            _of_this_process.add(self)

    @property
    def content(self) -> T:
        """What the files hold now, or held when they could be used last."""
        if self._look() != self._state:
            with self._lock:
                if self._look() != self._state:
                    self._read_again()
        return self._content

    def read_again(self) -> None:
        """Read the files whether they have changed or not."""
        with self._lock:
            self._read_again()

    def _read_again(self) -> None:
        self._state = self._look()
        try:
            self._content = self._read()
        except FlashsplitError as error:
            log.error("files.kept_as_before", why=error.message)
        else:
            log.info("files.read_again", files=[str(file) for file in self._files])

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return what tells that a file was written or replaced; a mounted secret's links then lead elsewhere."""
        return [_state_of(file) for file in self._files]


def constant(content: T) -> Reread[T]:
    """Return content that came from no file."""
    return Reread((), lambda: content)


def read_again_on_hangup() -> None:
    """Have SIGHUP read all files of this process again from now on, changed or not.

    Where it means that the process's terminal is gone, it does what SIGTERM does.
    """
    had_terminal = os.isatty(2)

    def hang_up() -> None:
        if had_terminal and not os.isatty(2):
            signal.raise_signal(signal.SIGTERM)
        for files in list(_of_this_process):
            files.read_again()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
