"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

REAL = ("tests/e2e/", "tests/deploy/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes against the clock, on machines that others use too: one second chance each, counted in the
    summary."""
    for item in items:
        if item.nodeid.startswith(REAL):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """A command that runs within a test sets up the log for its process; the next test must not notice."""
    yield
    structlog.reset_defaults()
