"""The socket that ties a child's life to its parent's, and tells each at once when the other ends, in whatever way.

Neither writes. When the parent is gone, reading ends in the child, which ends too. When the child is gone, reading ends
in the parent, and sooner than its process does: of one that is killed the system frees the memory first, a millisecond
for some ten megabytes, then closes its files, and only then tells its parent. So the child's end belongs to one of its
threads alone, which has a table of open files of its own (unshare(2), CLONE_FILES): it is closed as that thread ends,
while the last of all threads frees the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import threading
from concurrent.futures import Future
from pathlib import Path

_CLONE_FILES = 0x400
"""Linux's flag for a table of open files; Python's os lacks it before 3.12."""


class Lifeline:
    """The parent's end, and the child's until that is handed over. Use `close`.

    child_end: the descriptor for the child's `die_with`.
    """

    def __init__(self) -> None:
        self._own, self._childs = socket.socketpair()
        self._own.setblocking(False)
        self.child_end = self._childs.fileno()

    def handed_over(self) -> None:
        """Leave the child's end to the child, which has been started."""
        self._childs.close()

    async def cut(self) -> None:
        """Wait until the child has closed its end: it ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(self._own, 64):
                pass

    def close(self) -> None:
        """Have the child end. Nobody may wait in `cut`. Safe to call twice."""
        self._own.close()
        self._childs.close()


def die_with(descriptor: int, scratch: Path | None = None) -> None:
    """End this process at once when the other end is closed, and have the parent know when this process ends.

    scratch: the directory that the parent made for this process and can no longer remove.
    """
    alone = Future[bool]()

    def watch() -> None:
        alone.set_result(_keep_alone(descriptor))
        while os.read(descriptor, 64):
            pass
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    if alone.result():
        os.close(descriptor)


def _keep_alone(descriptor: int) -> bool:
    """Give this thread a table of open files of its own, with this one alone; False where the system refuses that, as
    in containers that may not use unshare(2)."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is None or unshare(_CLONE_FILES):
        return False
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/self/task/{threading.get_native_id()}/fd"):
            if int(name) != descriptor:
                # The one by which they are listed is closed already.
                with contextlib.suppress(OSError):
                    os.close(int(name))
    return True
