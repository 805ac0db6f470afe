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
def followed(tmp_path: Path) -> WorkerLog:
    made = WorkerLog(tmp_path / "worker.log")
    made.worker = "cpu (process 7)"
    return made


def line(event: str, level: str = "info", **fields: Any) -> bytes:
    return json.dumps({"event": event, "level": level, "timestamp": "2026-01-01", **fields}).encode() + b"\n"


def test_lines_are_carried_over_once(followed: WorkerLog) -> None:
    """Also one that comes in two pieces, and what is no log line."""
    with followed.open() as file, capture_logs() as said:
        first, second = line("session.closed", request_id="r1"), line("load.failed", "error", why="ü")
        file.write(first + second[:10])
        file.flush()
        followed.carry()
        followed.carry()
        file.write(second[10:] + b"Segmentation fault\n\n[1, 2]\n")
        file.flush()
        followed.carry()
    assert said == [
        {"event": "session.closed", "log_level": "info", "worker": "cpu (process 7)", "request_id": "r1"},
        {"event": "load.failed", "log_level": "error", "worker": "cpu (process 7)", "why": "ü"},
        {"event": "worker.said", "log_level": "info", "worker": "cpu (process 7)", "text": "Segmentation fault"},
        {"event": "worker.said", "log_level": "info", "worker": "cpu (process 7)", "text": "[1, 2]"},
    ]


def test_a_refusal_is_told_as_an_error_only(followed: WorkerLog) -> None:
    """Not a second time as a line of the log."""
    with followed.open() as file, capture_logs() as said:
        file.write(worker_log.REFUSAL.encode() + b"--device 'hip:0' needs a ROCm build of torch\n")
        file.flush()
        assert "hip:0" in followed.tail()
    assert said == []


def test_an_exception_is_named(followed: WorkerLog) -> None:
    with followed.open() as file:
        file.write(line("call.failed", "error", exception=[{"exc_type": "ValueError", "exc_value": "bad"}]))
        file.write(line("call.failed", "error", exception="not as we write it"))
        file.write(line("load.started"))
    with capture_logs() as said:
        assert followed.last_exception() == "ValueError: bad"
    assert [one.get("raised") for one in said] == ["ValueError: bad", None, None]


def test_the_tail(followed: WorkerLog) -> None:
    assert followed.tail() == ""
    with followed.open() as file, capture_logs():
        file.write(b"".join(b"line %d\n" % number for number in range(20)) + b"half a li")
        file.flush()
        assert followed.tail().splitlines()[-2:] == ["  line 19", "  half a li"]
        assert len(followed.tail().splitlines()) == 1 + worker_log.TAIL_LINES


def test_the_file_is_bounded(followed: WorkerLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It begins anew when it is large, and the worker's next line comes over as any other."""
    monkeypatch.setattr(worker_log, "MAX_BYTES", 1000)
    with followed.open() as file, capture_logs() as said:
        for number in range(100):
            file.write(line("session.closed", number=number))
            file.flush()
            followed.carry()
            assert (tmp_path / "worker.log").stat().st_size <= 1200
    assert [one["number"] for one in said] == list(range(100))


def test_a_file_that_is_gone_says_nothing(followed: WorkerLog) -> None:
    followed.carry()
    assert (followed.text(), followed.tail(), followed.last_exception()) == ("", "", None)
