"""How much memory of this process is allocated, by the word of the C library."""

from __future__ import annotations

import ctypes


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def allocated_bytes() -> int:
    """Bytes that are allocated and not freed, in C and in Python, wherever torch and its libraries allocate too."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)
