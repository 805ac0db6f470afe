"""What a session's device thread tells its event loop of. Called there, in the order in which it happened."""

from __future__ import annotations

from typing import Protocol

from services.errors import FlashsplitError
from services.messages.steps import Forward
from shard_worker.sampling.verifier import Produced


class Ledger(Protocol):
    """Who keeps count of a session's steps on the event loop."""

    def passed_on(self, passed: Forward, arrived_ns: int, forward_ns: int) -> None:
        """A step came, was computed here, and goes on to the next stage."""

    def unsent(self, passed: Forward) -> None:
        """That step could not be sent: it has to go the other way."""

    def decided(self, forward: Forward, arrived_ns: int, produced: Produced) -> None:
        """A step came and was decided here."""

    def broke(self, error: FlashsplitError) -> None:
        """The session cannot go on."""
