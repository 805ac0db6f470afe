"""For all tests."""

from __future__ import annotations

import gc
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from services.telemetry.logs import configure_logs
from tests import forking

# Tests must not depend on how fast, or how busy, the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


LONGEST = ("test_interpreting.py", "test_compiling.py")
"""Files that take minutes in one piece: begun last, they would be waited for alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; all others stay in order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays to the end: garbage collections need not look through it. Of what is
    made later they look through thirty times as much at once as by default, where they took an eighth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """A command that runs within a test sets up the log for its process; the next test must not notice."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def json_events(log_settings: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Log as a server does, in JSON; a call returns all events so far as a program reads them, one a line."""
    output = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", output)
        configure_logs("info", "json")
    return lambda: [json.loads(line) for line in output.getvalue().splitlines()]


@pytest.fixture
def own_processes() -> Iterator[None]:
    """Start workers and coordinators as users do: for tests of how processes start and end."""
    with forking.without():
        yield
