"""Steps that a stage has passed on, and whether an answer fits the one that waits for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import FailedPrecondition
from services.messages.steps import Commit, Forward, StepKind


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was passed on and not yet answered."""

    step: int
    base: int
    rows: int
    kind: StepKind
    arrived_ns: int
    forward_ns: int
    passed_bytes: int

    @classmethod
    def of(cls, passed: Forward, arrived_ns: int, forward_ns: int) -> InFlight:
        """passed: as the next stage gets it."""
        rows = len(passed.token_ids)
        return cls(passed.step, passed.base_position, rows, passed.kind, arrived_ns, forward_ns, passed.size_bytes)


def answered(flight: InFlight | None, commit: Commit) -> InFlight:
    """The step that waited longest, None where none does. Raises FailedPrecondition when the answer doesn't fit it."""
    verify = flight is not None and flight.kind is StepKind.VERIFY
    if (
        flight is None
        or commit.step != flight.step
        or not flight.base + min(flight.rows, 1) <= commit.length <= flight.base + flight.rows
        or (not verify and commit.length != flight.base + flight.rows)
    ):
        waiting = "no step" if flight is None else f"step {flight.step} from {flight.base}"
        raise FailedPrecondition(
            f"commit of step {commit.step} to length {commit.length} came while {waiting} was waiting",
            reason="OUT_OF_STEP",
        )
    return flight
