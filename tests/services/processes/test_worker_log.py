"""A worker's lines in this process's log: whole, by level, once each, and never without bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.processes import worker_log
from services.processes.worker_log import WorkerLog


@pytest.fixture
def worker_log_file(tmp_path: Path) -> WorkerLog:
    log = WorkerLog(tmp_path / "worker.log")
    log.worker = "cpu (process 7)"
    return log


def line(event: str, level: str = "info", **fields: Any) -> bytes:
    return json.dumps({"event": event, "level": level, "timestamp": "2026-01-01", **fields}).encode() + b"\n"


def test_lines_are_relayed_once(worker_log_file: WorkerLog) -> None:
    """Each line is relayed once, also one that is written in two pieces and one that is no log event."""
    with worker_log_file.open() as file, capture_logs() as events:
        first, second = line("session.closed", request_id="r1"), line("load.failed", "error", why="ü")
        file.write(first + second[:10])
        file.flush()
        worker_log_file.relay()
        worker_log_file.relay()
        file.write(second[10:] + b"Segmentation fault\n\n[1, 2]\n")
        file.flush()
        worker_log_file.relay()
    assert events == [
        {"event": "session.closed", "log_level": "info", "worker": "cpu (process 7)", "request_id": "r1"},
        {"event": "load.failed", "log_level": "error", "worker": "cpu (process 7)", "why": "ü"},
        {"event": "worker.said", "log_level": "info", "worker": "cpu (process 7)", "text": "Segmentation fault"},
        {"event": "worker.said", "log_level": "info", "worker": "cpu (process 7)", "text": "[1, 2]"},
    ]


def test_a_refusal_is_no_log_event(worker_log_file: WorkerLog) -> None:
    """The sentence with which a worker refuses its command line becomes an error, so it is not relayed as well."""
    with worker_log_file.open() as file, capture_logs() as events:
        file.write(worker_log.REFUSAL.encode() + b"--device 'hip:0' needs a ROCm build of torch\n")
        file.flush()
        [last_line] = worker_log_file.last_lines()
    assert "hip:0" in last_line
    assert events == []


def test_an_exception_is_named(worker_log_file: WorkerLog) -> None:
    """The last exception is told by type and text, and stands in its event's field `raised`."""
    with worker_log_file.open() as file:
        file.write(line("call.failed", "error", exception=[{"exc_type": "ValueError", "exc_value": "bad"}]))
        file.write(line("call.failed", "error", exception="not as we write it"))
        file.write(line("load.started"))
    with capture_logs() as events:
        assert worker_log_file.last_exception() == "ValueError: bad"
    assert [event.get("raised") for event in events] == ["ValueError: bad", None, None]


def test_the_last_lines(worker_log_file: WorkerLog) -> None:
    """So many of them as promised, the unfinished one included, blank ones left out."""
    assert worker_log_file.last_lines() == ()
    with worker_log_file.open() as file, capture_logs():
        file.write(b"".join(b"line %d\n" % number for number in range(20)) + b"\nhalf a li")
        file.flush()
        lines = worker_log_file.last_lines()
    complete = [f"line {number}" for number in range(20)]
    assert lines == (*complete[1 - worker_log.LAST_LINES :], "half a li")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ('{"level": "info", "event": "load.started", "layers": [0, 6]}',
         {"level": "info", "event": "load.started", "layers": [0, 6]}),
        ("Segmentation fault", "Segmentation fault"),
        ("[1, 2]", "[1, 2]"),
        ('{"event": "no level"}', '{"event": "no level"}'),
        ('{"level": 3, "event": {}}', '{"level": 3, "event": {}}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)  # fmt: skip
def test_parsing_a_line(text: str, parsed: object) -> None:
    """An event becomes its fields; whatever else a process may print stays text."""
    assert worker_log.parse_line(text) == parsed


def test_the_file_is_bounded(worker_log_file: WorkerLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is emptied when it is large, and the worker's next line is relayed as any other."""
    monkeypatch.setattr(worker_log, "MAX_BYTES", 1000)
    with worker_log_file.open() as file, capture_logs() as events:
        for number in range(100):
            file.write(line("session.closed", number=number))
            file.flush()
            worker_log_file.relay()
            assert (tmp_path / "worker.log").stat().st_size <= 1200
    assert [event["number"] for event in events] == list(range(100))


def test_a_file_that_is_gone_says_nothing(worker_log_file: WorkerLog) -> None:
    """A log file that does not exist is as good as an empty one."""
    worker_log_file.relay()
    assert (worker_log_file.text(), worker_log_file.last_lines(), worker_log_file.last_exception()) == ("", (), None)
