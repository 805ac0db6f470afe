"""Memory that was freed, and that the C library keeps."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give freed memory back to the system; glibc keeps it in the arena of each thread, other libraries do not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
