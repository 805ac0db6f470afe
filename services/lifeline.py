"""A child's end of the pipe that ties its life to its parent's.

The parent holds the other end and never writes: when it is gone, however it went, reading ends and so does the child.
"""

from __future__ import annotations

import os
import threading


def die_with(descriptor: int) -> None:
    """End this process, without ceremony, when the pipe's other end is closed."""

    def watch() -> None:
        while os.read(descriptor, 64):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
