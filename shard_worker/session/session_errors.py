"""What becomes of an error of a session: what its client may see, and what stages before this one are told."""

from __future__ import annotations

import structlog

from services.errors import FlashsplitError, InternalError
from services.messages.steps import Failure, FailureReason, Location
from shard_worker.device.executor import device_error

log = structlog.get_logger()


def reported(error: Exception, request_id: str) -> FlashsplitError:
    """Return the error as the client may see it: an unknown one goes to the log, and becomes an InternalError."""
    known = device_error(error)
    if isinstance(known, FlashsplitError):
        return known
    log.error("session.step_failed", request_id=request_id, exc_info=error)
    return InternalError("internal error: the log has the details")


def failure_below(error: FlashsplitError, location: Location) -> Failure:
    """Return what to tell up the chain about an error of the worker at `location`, or of the way to it."""
    broken = error.code_name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
    reason = FailureReason.LINK_BROKEN if broken else FailureReason.STAGE_FAILED
    return Failure(reason, f"{location}: {error.message}", location, error.code_name, error.reason)
