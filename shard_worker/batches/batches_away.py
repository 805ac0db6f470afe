"""The batches of a chain of several stages that others of them compute, and whether to wait for one.

A stage takes about as long for a few rows as for many. So what waits here alone, where other sessions' steps soon come
back, is computed together with these. Who computes steps tells which leave and which are back. It must not know what
steps are, nor how they travel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

LATE = 1.5
"""By how many times the time that rounds take a batch is waited for: it may not come back, or its sessions pause."""

_ROUNDS = 8
"""About so many rounds count for how long one takes."""


class Travelling(Protocol):
    """What a session is here."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more steps."""


class BatchesAway:
    """The sessions whose last step was computed here, and whose next one comes from another stage by itself.

    `back` may be called on any thread, all else is called on the device thread.
    """

    def __init__(self) -> None:
        self._batches: dict[int, tuple[Travelling, ...]] = {}
        """The sessions of each batch, by when it left, by `time.monotonic_ns`."""
        self._left_ns: dict[Travelling, int] = {}
        """When each session's last batch left."""
        self._round_ns = 0.0
        """How long batches take until they are back; 0 where none was yet."""

    def left(self, sessions: Iterable[Travelling]) -> None:
        """Note that a batch leaves, with the steps of these sessions."""
        now_ns, batch = time.monotonic_ns(), tuple(session for session in sessions if not session.closed)
        if batch:
            self._batches[now_ns] = batch
        for session in batch:
            self._left_ns[session] = now_ns

    def back(self, session: Travelling) -> None:
        """Note that a session's next step is here, and so its batch."""
        left_ns = self._left_ns.pop(session, None)
        if left_ns is None or self._batches.pop(left_ns, None) is None:
            return
        took_ns = time.monotonic_ns() - left_ns
        if self._round_ns:
            # One that paused says little of the others.
            took_ns = min(took_ns, int(2 * self._round_ns))
        self._round_ns += (took_ns - self._round_ns) / (_ROUNDS if self._round_ns else 1)

    def expected(self, beside: Travelling | None = None) -> int:
        """Return how many batches should be back soon, beside the one of this session."""
        in_time_ns, count = time.monotonic_ns() - LATE * self._round_ns, 0
        own_ns = None if beside is None else self._left_ns.get(beside)
        for left_ns, batch in [*self._batches.items()]:
            if all(session.closed for session in batch):
                self._batches.pop(left_ns, None)
            elif left_ns >= in_time_ns and left_ns != own_ns:
                count += 1
        return count

    def forget(self, session: Travelling) -> None:
        """Forget a session that takes no more steps."""
        left_ns = self._left_ns.pop(session, 0)
        if all(one.closed for one in self._batches.get(left_ns, ())):
            self._batches.pop(left_ns, None)
