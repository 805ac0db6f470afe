"""A child's end of the pipe that ties its life to its parent's.

The parent holds the other end and never writes: when the parent is gone, for whatever reason, reading ends and so does
the child.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


def die_with(descriptor: int, scratch: Path | None = None) -> None:
    """End this process at once when the pipe's other end is closed.

    scratch: the directory that the parent made for this process and can no longer remove.
    """

    def watch() -> None:
        while os.read(descriptor, 64):
            pass
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
