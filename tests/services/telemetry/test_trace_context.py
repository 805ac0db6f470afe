"""W3C's traceparent, read strictly, and the ids that a call's log lines carry."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from services.telemetry.trace_context import Trace, calling, current_call, parse_traceparent, trace_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"

REFUSED = [
    "",
    "00",
    VALID[:-1],
    VALID + "0",
    VALID + "-",
    VALID + "-00",
    VALID.upper(),
    " " + VALID,
    VALID + "\n",
    VALID.replace("-", "_"),
    f"ff-{TRACE}-{SPAN}-01",
    f"0x-{TRACE}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{SPAN}-0g",
    f"00-{TRACE[:-1]}٣-{SPAN}-01",
    f"cc-{TRACE}-{SPAN}-01-{'x' * 256}",
]


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (VALID, True),
        (VALID[:-2] + "00", False),
        (VALID[:-2] + "fe", False),
        (VALID[:-2] + "ff", True),
        # Versions to come: what they share with 00.
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_valid_headers(text: str, sampled: bool) -> None:
    """Trace, span and whether it is recorded; what is handed on is version 00 again."""
    trace = parse_traceparent(text)
    assert trace == Trace(TRACE, SPAN, sampled)
    assert trace.traceparent == f"00-{TRACE}-{SPAN}-0{int(sampled)}"


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_header_begins_a_new_trace(text: str) -> None:
    """Nothing of it is taken over."""
    assert parse_traceparent(text) is None
    begun = trace_of([text])
    assert begun.trace_id != TRACE
    assert (begun.span_id, begun.sampled) == (None, False)


def test_two_headers_are_none() -> None:
    """Nobody knows which one counts; without any, traces differ from each other."""
    assert trace_of([VALID, VALID]).trace_id != TRACE
    assert trace_of([]).trace_id != trace_of([]).trace_id
    assert trace_of([VALID]).trace_id == TRACE


def test_a_child_is_of_the_same_trace() -> None:
    """Below a client's span, and below none."""
    above = Trace(TRACE, SPAN, True)
    child = above.child()
    assert (child.trace_id, child.sampled) == (TRACE, True)
    assert child.span_id not in (None, SPAN)
    assert parse_traceparent(Trace().traceparent) is not None


async def test_a_call_reaches_its_own_tasks_only() -> None:
    """Two calls at once: each one's tasks see its name, in log lines too, and nothing is left behind."""

    both_run = asyncio.Barrier(2)

    async def seen() -> tuple[str, str, object]:
        await both_run.wait()
        call, bound = current_call(), structlog.contextvars.get_contextvars()
        assert call is not None
        return call.request_id, call.trace.trace_id, bound["trace_id"]

    async def answer(name: str, headers: list[str]) -> tuple[str, str, object]:
        with calling(name, headers) as call:
            seen_ids = await asyncio.create_task(seen())
            assert seen_ids[1:] == (call.trace.trace_id, call.trace.trace_id)
        assert current_call() is None
        return seen_ids

    mine, yours = await asyncio.gather(answer("mine", [VALID]), answer("yours", []))
    assert (mine[0], mine[1], yours[0]) == ("mine", TRACE, "yours")
    assert yours[1] != TRACE
    assert structlog.contextvars.get_contextvars() == {}
