"""What the device thread tells the event loop of sessions, in the order in which it happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.errors import FlashsplitError
from services.messages.batch_frames import BatchAnswer
from services.messages.steps import Commit, Forward, Proposal
from services.records import record
from shard_worker.drafting.engine import DraftRequest
from shard_worker.sampling.verifier import StepOutcome
from shard_worker.session.checks import PassedStep


@record(frozen=True, slots=True)
class StepPassedOn:
    """A step was computed, and goes on to the next stage from the device thread.

    counted: the event loop has counted it already, since it came to it first.
    """

    passed: PassedStep
    counted: bool = False


@dataclass(frozen=True, slots=True)
class StepNotSent:
    """The lane did not take that step: the event loop has to send it to the next stage."""

    step: Forward


@record(frozen=True, slots=True)
class StepAnswered:
    """A step that went on together with others was answered with them.

    commit: with this stage's times. proposal: where draft tokens were asked for, else None. told: the device thread
    answers it.
    """

    commit: Commit
    proposal: Proposal | None
    told: bool = False


@record(frozen=True, slots=True)
class AnswerNotSent:
    """The caller did not take that answer with those of other sessions: the event loop has to send it."""

    answer: BatchAnswer


@record(frozen=True, slots=True)
class StepDecided:
    """A step was computed on the last stage, which decided how many of its rows count and what it produced.

    queued_ns: how long it waited beside computing. drafting: `StepDrafted` will tell what came of it for the draft.
    answered: the device thread answers it.
    """

    step: Forward
    arrived_ns: int
    queued_ns: int
    outcome: StepOutcome
    drafting: bool
    answered: bool


@record(frozen=True, slots=True)
class StepDrafted:
    """The draft beside the stage has taken a step's features and proposed what it was asked for; or there is none.

    request: what was asked for, if anything was.
    """

    request: DraftRequest | None
    draft_tokens: tuple[int, ...]
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class DraftFailed:
    """The draft beside the stage can do no more for the session."""

    error: FlashsplitError


@dataclass(frozen=True, slots=True)
class SessionBroken:
    """The session cannot go on."""

    error: FlashsplitError


DeviceEvent = (
    StepPassedOn | StepNotSent | StepAnswered | AnswerNotSent | StepDecided | StepDrafted | DraftFailed | SessionBroken
)

MOST_UNTOLD = 1024
"""So many events that nobody waits for are handled at once."""


class DeviceEvents:
    """Events of all sessions on their way from the device thread to the event loop, where they are handled in their
    order."""

    def __init__(self) -> None:
        """Must be called on the event loop."""
        self.loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Callable[[DeviceEvent], None], DeviceEvent]] = deque()
        self._announced = False
        """Whether the event loop will handle what waits."""
        self._pressing = False
        """Whether somebody waits for one of them."""
        self._awaiting = 0
        """How many wait for any event."""

    def put(self, handle: Callable[[DeviceEvent], None], event: DeviceEvent, *, pressing: bool = True) -> None:
        """Add an event; to be called on the device thread.

        handle: is called with it on the event loop, which sees it with the next `announce`; it must not raise.
        pressing: somebody waits for it; others are handled with those, or when the event loop asks for them.
        """
        self._waiting.append((handle, event))
        self._pressing |= pressing

    def announce(self) -> None:
        """Have the event loop handle all that waits, if anything is pressing; to be called on the device thread."""
        waits = self._pressing or (self._awaiting and self._waiting) or len(self._waiting) >= MOST_UNTOLD
        if self._announced or not waits:
            return
        self._announced = True
        # The loop may be over, and with it who would want to know.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.handle_waiting)

    def handle_waiting(self) -> None:
        """Handle all that waits now; to be called on the event loop."""
        # Before the first event is looked for: what is added behind the last one is announced again.
        self._announced = self._pressing = False
        while self._waiting:
            handle, event = self._waiting.popleft()
            handle(event)

    @contextlib.contextmanager
    def awaiting(self) -> Iterator[None]:
        """Have events announced that are not pressing too, meanwhile; those that wait are handled before. To be called
        on the event loop."""
        self._awaiting += 1
        try:
            self.handle_waiting()
            yield
        finally:
            self._awaiting -= 1
