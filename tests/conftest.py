"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """A command that runs within a test sets up the log for its process; the next test must not notice."""
    yield
    structlog.reset_defaults()
