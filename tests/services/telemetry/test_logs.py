"""Log lines of a process: where they go, in which form, and what they leave out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = """
import structlog
from services.telemetry.logs import configure_logs
configure_logs("info", {form!r})
log = structlog.get_logger()
log.debug("too.quiet")
structlog.contextvars.bind_contextvars(request_id="r1")
log.info("worker.ready", address="unix:/a")
log.info("cluster.lost", last_lines=[{{"event": "load.started", "part": 3}}, "Segmentation fault"])
prompt = "my secret prompt".upper()
try:
    len(prompt) / 0
except ZeroDivisionError:
    log.exception("call.failed")
"""


def run(form: str | None) -> list[str]:
    code = CODE.format(form=form)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "too.quiet" not in done.stderr
    assert "MY SECRET" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["json", None])
def test_json_where_no_terminal_reads(form: str | None) -> None:
    """One JSON object a line on stderr, with level, time, context and a traceback without local variables."""
    ready, lost, failed = [json.loads(line) for line in run(form)]
    assert {"event": "worker.ready", "level": "info", "address": "unix:/a", "request_id": "r1"}.items() <= ready.items()
    assert ready["timestamp"].endswith("Z")
    assert lost["last_lines"] == [{"event": "load.started", "part": 3}, "Segmentation fault"]
    assert failed["exception"][0]["exc_type"] == "ZeroDivisionError"


def test_text_for_people() -> None:
    """Plain lines and a plain traceback when JSON is not wanted."""
    lines = run("console")
    assert "worker.ready" in lines[0]
    assert lines[2].split() == ["load.started", "part=3"]
    assert lines[3].startswith("    Segmentation fault")
    assert lines[-1] == "ZeroDivisionError: division by zero"
