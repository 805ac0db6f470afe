"""Whose a worker is: what it has loaded is for the process that had it loaded, and for nobody else.

The holder keeps the worker for as long as it listens to the heartbeats, and LEASE_S longer: so a broken connection
loses nothing, and a coordinator that is started again has its workers back soon. What a holder had loaded stays for
longer, for whoever takes the worker next: `left_for_s` says since when nobody has cared for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

import structlog

from services.errors import FailedPrecondition
from services.messages.holder import LEASE_S, WORKER_HELD, Holder

log = structlog.get_logger()


class Lease:
    """The lease of one worker; to be used on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holder: Holder | None = None
        self._since = ""
        self._left_at = 0.0
        self._was_listened_to = False
        self._listening = Counter[str]()

    def take(self, holder: Holder | None) -> None:
        """Give the worker to a process that wants to load something; None for one that does not say who it is, after
        which anybody may use what is loaded.

        Raises FailedPrecondition while another process holds it.
        """
        self.check(None if holder is None else holder.holder_id)
        if holder == self._holder:
            return
        if holder is not None:
            log.info("worker.held", holder=holder.name)
        self._holder, self._since = holder, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        # It has so long to begin to listen.
        self._left_at = self._clock()
        self._was_listened_to = self.is_listened_to

    def end(self) -> None:
        """Let nobody hold the worker any more: nothing is loaded."""
        self._holder = None

    @property
    def left_for_s(self) -> float:
        """How long the process that holds the worker, or held it last, has not listened any more; 0 while it does, and
        where nobody holds the worker or its holder never listens, as releases do that know no heartbeats."""
        if self._holder is None or not self._was_listened_to or self.is_listened_to:
            return 0.0
        return self._clock() - self._left_at

    @property
    def is_listened_to(self) -> bool:
        """Whether the process listens that holds the worker."""
        return self._holder is not None and bool(self._listening[self._holder.holder_id])

    def check(self, holder_id: str | None) -> None:
        """Check that a caller may use what is loaded. Raises FailedPrecondition while another process holds the
        worker."""
        holder = self._holder
        if holder is None or holder.holder_id == holder_id or not self._valid(holder):
            return
        raise FailedPrecondition(
            f"this worker is held by {holder.name} since {self._since}: use another worker, or end that process, after "
            f"which the worker is free within {LEASE_S:g} s",
            reason=WORKER_HELD,
            holder=holder.name,
        )

    @contextlib.contextmanager
    def listening(self, holder_id: str) -> Iterator[None]:
        """Note that a process listens to the worker's heartbeats within the context."""
        self._listening[holder_id] += 1
        self._was_listened_to = self._was_listened_to or self.is_listened_to
        try:
            yield
        finally:
            self._listening[holder_id] -= 1
            if not self._listening[holder_id]:
                del self._listening[holder_id]
                if self._holder is not None and self._holder.holder_id == holder_id:
                    self._left_at = self._clock()

    def _valid(self, holder: Holder) -> bool:
        return bool(self._listening[holder.holder_id]) or self._clock() < self._left_at + LEASE_S
