"""A child's scratch directory: private, removed by its owner, and swept up later where its owner could not.

The owner holds a lock on a file in it for as long as it lives; a directory that somebody else can lock is left over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "flashsplit-"
_LOCK = "lock"


class Scratch:
    """A new directory for this user only; making one removes those of this user whose owners are gone."""

    def __init__(self) -> None:
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: int | None = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the directory. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _sweep() -> None:
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # Other users' directories cannot be opened, and another sweeper may be sooner.
        with contextlib.suppress(OSError):
            if lock_file.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
