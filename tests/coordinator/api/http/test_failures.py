"""What clients and the log are told when a worker fails."""

from __future__ import annotations

from structlog.testing import capture_logs

from services.errors import Unavailable
from tests.coordinator.api.http.conftest import Connect
from tests.coordinator.fakes import Script, engine

SOCKET = "unix:/tmp/flashsplit-a1/worker.sock"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_sockets_are_named_to_operators_alone(connect: Connect) -> None:
    """Before the answer and within it: the client reads that a worker is gone, the log says which, once each."""
    gone = Unavailable(f"stage 0 (cpu on vm, {SOCKET}): {SOCKET} does not answer")
    closed = await connect(engine(Script(open_error=gone)))
    broken = await connect(engine(Script(failures={2: gone})))
    with capture_logs() as lines:
        status, whole = await closed.post("/v1/chat/completions", HI)
        events = await broken.stream("/v1/chat/completions", HI)
        _, *_, (_, failed) = await broken.stream("/v1/responses", {"input": "hi"})
    assert status == 503
    messages = [whole["error"]["message"], events[-1][1]["error"]["message"], failed["response"]["error"]["message"]]
    assert messages == ["stage 0 (cpu on vm, a local worker): a local worker does not answer"] * 3
    told = [line for line in lines if line["event"] in ("http.failed", "http.stream_failed")]
    assert [line["event"] for line in told] == ["http.failed", "http.stream_failed", "http.stream_failed"]
    assert all(line["why"] == gone.message and line["log_level"] == "warning" for line in told)
