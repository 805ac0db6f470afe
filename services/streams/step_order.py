"""What a session's steps came to, in the order of the steps, where answers come on two ways: some in the session's own
stream, some with those of other sessions. Neither way waits for the other."""

from __future__ import annotations

from collections.abc import Sequence

from services.errors import FailedPrecondition
from services.messages.batch_frames import BatchAnswer
from services.messages.steps import Commit, Event, Proposal

MOST_EARLY = 1024
"""How many steps an answer may be ahead of its turn: many times as many as may be under way."""


class StepOrder:
    """Holds back what comes before its turn. Each step has one commit, and a proposal behind it if that one says so."""

    def __init__(self) -> None:
        self._step = 0
        """The next step to be answered."""
        self._proposal_due = False
        """Whether the draft tokens behind the step before it are still to come."""
        self._early: dict[int, list[Commit | Proposal]] = {}
        """What has come before its turn, by its step."""

    def add(self, event: Event | BatchAnswer) -> Sequence[Event]:
        """Take an event, or an answer that came with those of other sessions; return all events whose turn it is.

        Raises FailedPrecondition for an answer to a step that was answered before, or that cannot have begun.
        """
        came: Sequence[Commit | Proposal]
        if isinstance(event, BatchAnswer):
            came = (event.commit,) if event.proposal is None else (event.commit, event.proposal)
        elif isinstance(event, Commit | Proposal):
            came = (event,)
        else:
            # What is no answer to a step is said when none is under way, or ends the session.
            return (event,)
        step = came[0].step
        if isinstance(came[0], Commit) and not self._step <= step <= self._step + MOST_EARLY:
            raise FailedPrecondition(
                f"step {step} is answered, and the next one to be answered is {self._step}",
                reason="OUT_OF_STEP",
                field="step",
            )
        is_due = step == self._step and not self._proposal_due if isinstance(came[0], Commit) else step < self._step
        if not is_due:
            self._early.setdefault(step, []).extend(came)
            return ()
        self._count(came)
        if not self._early:
            return came
        told = [*came]
        while not self._proposal_due and (early := self._early.pop(self._step, None)) is not None:
            self._count(early)
            told += early
        return told

    def _count(self, answer: Sequence[Commit | Proposal]) -> None:
        first, *proposals = answer
        if isinstance(first, Proposal):
            self._proposal_due = False
            return
        self._step = first.step + 1
        self._proposal_due = bool(first.propose_tokens and first.token_ids and not proposals)
