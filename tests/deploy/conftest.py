"""What these tests share with those of the processes."""

from __future__ import annotations

from tests.e2e.conftest import start_worker

__all__ = ["start_worker"]
