"""What a session leaves in the log: who asked, where it ran, how much it did and why it ended."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from services.errors import InvalidArgument, Unavailable, ending
from services.layers import LayerRange
from services.messages.steps import Location
from services.telemetry.trace_context import Trace
from shard_worker.session_record import SessionRecord

TRACE = Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
STAGE, DRAFT = Location(1, "alpha", "cpu", "a:1"), Location(None, "alpha", "cpu", "a:1")


def test_two_lines_a_session() -> None:
    """The closing line has the figures, and comes once, however often a session is closed."""
    with capture_logs() as lines:
        record = SessionRecord("r", TRACE, STAGE, LayerRange(3, 8))
        record.steps = 2
        assert record.timed(lambda number: number + 1, 4) == 5
        record.end("closed", 17)
        record.end("closed", 17)
    opened, closed = lines
    who = {"request_id": "r", "trace_id": TRACE.trace_id, "role": "target", "stage": 1, "layers": "[3, 8)"}
    assert opened == {**who, "event": "session.opened", "log_level": "debug", "device": "cpu"}
    assert closed.items() >= {**who, "event": "session.closed", "log_level": "info"}.items()
    assert (closed["steps"], closed["tokens"], closed["ended"]) == (2, 17, "closed")
    assert 0 <= closed["forward_ms"] <= closed["ms"] + 1


def test_a_draft_without_a_trace() -> None:
    """A draft's lines leave out what it does not have."""
    with capture_logs() as lines:
        SessionRecord("r", None, DRAFT, None).end("closed", 0)
    for line in lines:
        assert line["role"] == "draft"
        assert not {"trace_id", "stage", "layers"} & line.keys()


@pytest.mark.parametrize(
    "error", [Unavailable("gone", reason="WORKER_DIED"), InvalidArgument("senseless"), ValueError()]
)
def test_the_first_failure_counts(error: Exception) -> None:
    """A failure is reported rather than how the caller then closes; without one, how the stream ended is."""
    word = ending(error)
    assert word in ("worker_died", "invalid_argument", "internal")
    with capture_logs() as lines:
        failed = SessionRecord("r", TRACE, STAGE, LayerRange(0, 1))
        failed.failed("LINK_BROKEN")
        failed.failed("later")
        failed.end(word, 1)
        SessionRecord("r", TRACE, STAGE, LayerRange(0, 1)).end(word, 1)
    assert [line["ended"] for line in lines if line["event"] == "session.closed"] == ["link_broken", word]
