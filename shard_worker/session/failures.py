"""What a stage tells up the chain of an error below it."""

from __future__ import annotations

from dataclasses import replace

from services.errors import FlashsplitError
from services.messages.steps import Failure, FailureReason, Location


def failure_below(error: FlashsplitError, location: Location) -> Failure:
    """Of the stage there, or of the way to it."""
    broken = error.code_name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
    reason = FailureReason.LINK_BROKEN if broken else FailureReason.STAGE_FAILED
    return Failure(reason, f"{location}: {error.message}", location, error.code_name)


def draft_lost(error: FlashsplitError, beside: Location) -> Failure:
    """Of a session's draft, after which it goes on. beside: the last stage, for what the error does not say."""
    where = error.where
    place = Location(
        None,
        where.get("host", beside.host),
        where.get("device", beside.device),
        where.get("address", beside.address),
    )
    return replace(failure_below(error, place), reason=FailureReason.DRAFT_LOST)
