"""A cable between two network namespaces: frames arrive later by a delay and at most at a rate, both ways alike.

Made of two TAP devices and a thread, as not every kernel has netem. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES = 1 << 16


@dataclass
class _Way:
    """One direction: frames on their way with the time at which each is there."""

    source: int
    sink: int
    frames: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0


class Wire:
    """Devices `names`, to be moved into their namespaces. delay_s: each way; may be changed, as may `cut`."""

    def __init__(self, names: tuple[str, str], *, delay_s: float = 0.0, bits_per_s: float = 1e9) -> None:
        self.delay_s, self.cut = delay_s, False
        self._seconds_a_byte = 8 / bits_per_s
        first, second = (_tap(name) for name in names)
        self._ways = (_Way(first, second), _Way(second, first))
        self._closing, self._closed = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The devices go with it."""
        os.write(self._closed, b".")
        self._thread.join()
        for number in (*(way.source for way in self._ways), self._closing, self._closed):
            os.close(number)

    def _run(self) -> None:
        # Timers are rounded up by 50 µs otherwise.
        with contextlib.suppress(OSError):
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1000")
        sources = [way.source for way in self._ways]
        while True:
            waiting = [way.frames[0][0] for way in self._ways if way.frames]
            timeout = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            readable, _, _ = select.select([*sources, self._closing], [], [], timeout)
            if self._closing in readable:
                return
            for way in self._ways:
                if way.source in readable:
                    self._take(way)
                self._give(way)

    def _take(self, way: _Way) -> None:
        """All frames that are there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(way.source, _FRAME_BYTES)
                now = time.monotonic()
                way.free_at = max(way.free_at, now) + len(frame) * self._seconds_a_byte
                if not self.cut:
                    way.frames.append((way.free_at + self.delay_s, frame))

    def _give(self, way: _Way) -> None:
        """All frames whose time has come."""
        while way.frames and way.frames[0][0] <= time.monotonic():
            _, frame = way.frames.popleft()
            # A device that is down, or full, loses frames, as a network does.
            with contextlib.suppress(OSError):
                os.write(way.sink, frame)


def _tap(name: str) -> int:
    number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return number
