"""The batches of a chain of several stages that others of them compute, and whether to wait for one.

A stage takes about as long for a few rows as for many. So what waits here alone, where other sessions' steps soon come
back, is computed together with these. Who computes steps tells which leave and which are back. It must not know what
steps are, nor how they travel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Batch:
    """The sessions of a batch whose next steps are away. drafted: as of `BatchesAway.left`."""

    plain: tuple[Travelling, ...]
    drafted: tuple[Travelling, ...]

    @property
    def is_over(self) -> bool:
        """Whether none of them takes more steps."""
        return all(session.closed for session in (*self.plain, *self.drafted))


class BatchesAway:
    """The sessions whose last step was computed here, and whose next one comes from another stage by itself.

    `back` may be called on any thread, all else is called on the device thread.
    """

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        """By when each left, by `time.monotonic_ns`."""
        self._left_ns: dict[Travelling, int] = {}
        """When each session's last batch left."""
        self._round_ns = 0.0
        """How long batches take until they are back; 0 where none was yet."""

    def left(self, plain: Iterable[Travelling], drafted: Iterable[Travelling] = ()) -> None:
        """Note that a batch leaves, with the steps of these sessions. drafted: those whose next steps come later than
        the others', as draft tokens are made for them before."""
        now_ns, batch = time.monotonic_ns(), _Batch(_open(plain), _open(drafted))
        if batch.plain or batch.drafted:
            self._batches[now_ns] = batch
        for session in (*batch.plain, *batch.drafted):
            self._left_ns[session] = now_ns

    def back(self, session: Travelling) -> None:
        """Note that a session's next step is here, and so its part of its batch."""
        left_ns = self._left_ns.get(session, 0)
        batch = self._batches.get(left_ns)
        if batch is None:
            return
        if session in batch.plain:
            batch.plain = ()
        elif session in batch.drafted:
            batch.drafted = ()
        if batch.plain or batch.drafted:
            return
        self._batches.pop(left_ns, None)
        took_ns = time.monotonic_ns() - left_ns
        if self._round_ns:
            # One that paused says little of the others.
            took_ns = min(took_ns, int(2 * self._round_ns))
        self._round_ns += (took_ns - self._round_ns) / (_ROUNDS if self._round_ns else 1)

    def expected(self) -> int:
        """Return how many batches should be back soon, but for those of which only drafted steps are away."""
        for left_ns, batch in [*self._batches.items()]:
            if batch.is_over:
                self._batches.pop(left_ns, None)
        return sum(bool(batch.plain) and self._is_in_time(left_ns) for left_ns, batch in [*self._batches.items()])

    def rest(self, sessions: Iterable[Travelling]) -> int:
        """Return how many drafted steps should be back soon of the batches that these sessions' last steps were in."""
        left = {self._left_ns.get(session, 0) for session in sessions}
        batches = [self._batches[left_ns] for left_ns in left if left_ns in self._batches and self._is_in_time(left_ns)]
        return sum(not session.closed for batch in batches for session in batch.drafted)

    def forget(self, session: Travelling) -> None:
        """Forget a session that takes no more steps."""
        left_ns = self._left_ns.pop(session, 0)
        batch = self._batches.get(left_ns)
        if batch is not None and batch.is_over:
            self._batches.pop(left_ns, None)

    def _is_in_time(self, left_ns: int) -> bool:
        return left_ns >= time.monotonic_ns() - LATE * self._round_ns


def _open(sessions: Iterable[Travelling]) -> tuple[Travelling, ...]:
    return tuple(session for session in sessions if not session.closed)
