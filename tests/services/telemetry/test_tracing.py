"""Spans where they are wanted, nothing at all where they are not; each case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CODE = f"""
import sys, time
{{before}}
from services.telemetry.logs import configure_logs
from services.telemetry.trace_context import Trace
from services.telemetry.tracing import begin, start_tracing
configure_logs("info", "json")
start_tracing("a-service")
above = begin("above", {{parent}}, "server", gen_ai__usage__input_tokens=7, left__out=None)
now = time.monotonic()
above.phase("phase", now - 1, now - 0.25)
below = begin("below", above.trace)
assert below.trace.trace_id == above.trace.trace_id == "{TRACE}"
assert below.trace.span_id != above.trace.span_id
below.end("went_wrong")
above.end()
print("opentelemetry.sdk" in sys.modules)
"""


def run(
    parent: str = f'Trace("{TRACE}", "{SPAN}", True)', before: str = "", **environment: str
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """What it printed, the console exporter's spans by name, and the log lines."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    code = CODE.format(parent=parent, before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines()]
    spans = {line["name"]: line for line in events if "context" in line}
    return done.stdout.strip(), spans, [line for line in events if "event" in line]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_off(environment: dict[str, str]) -> None:
    """Nothing of OpenTelemetry is imported, and ids go on all the same."""
    assert run(**environment) == ("False", {}, [])


def test_console() -> None:
    """One line of JSON a span, below the caller's, with attributes, times and what went wrong."""
    imported, spans, events = run(OTEL_TRACES_EXPORTER="console")
    assert (imported, events) == ("True", [])
    above, below, phase = spans["above"], spans["below"], spans["phase"]
    assert above["parent_id"] == f"0x{SPAN}"
    assert {span["context"]["trace_id"] for span in spans.values()} == {f"0x{TRACE}"}
    assert below["parent_id"] == phase["parent_id"] == above["context"]["span_id"]
    assert above["attributes"] == {"gen_ai.usage.input_tokens": 7}
    assert (below["status"]["status_code"], below["attributes"]) == ("ERROR", {"error.type": "went_wrong"})
    assert above["resource"]["attributes"]["service.name"] == "a-service"
    assert phase["start_time"] < phase["end_time"] < above["end_time"]


def test_a_root_has_the_trace_id_that_was_told() -> None:
    """And the service the name that the environment gives."""
    _, spans, _ = run(f'Trace("{TRACE}")', OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="another")
    assert spans["above"]["parent_id"] is None
    assert spans["above"]["context"]["trace_id"] == f"0x{TRACE}"
    assert spans["above"]["resource"]["attributes"]["service.name"] == "another"


def test_a_client_that_records_nothing() -> None:
    """Nor does anybody below it."""
    assert run(f'Trace("{TRACE}", "{SPAN}")', OTEL_TRACES_EXPORTER="console") == ("True", {}, [])


def test_without_the_extra() -> None:
    """One line that says what to install; everything else works."""
    _, spans, [events] = run(before="sys.modules['opentelemetry.sdk'] = None", OTEL_TRACES_EXPORTER="console")
    assert spans == {}
    assert (events["event"], events["level"]) == ("tracing.unavailable", "warning")
    assert "flashsplit[otel]" in events["why"]


def test_a_collector_that_is_gone() -> None:
    """It is told in our own log and holds up the end for a moment only."""
    began = time.monotonic()
    _, _, events = run(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert time.monotonic() - began < 8
    assert {line["event"] for line in events} == {"tracing.notice"}
