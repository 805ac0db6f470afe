"""What the tests of all products on CPUs share."""

from __future__ import annotations

import pytest
import torch

from shard_worker.cpu_kernels import native


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads there are, each with some work."""
    monkeypatch.setattr(native, "_LEAST_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param
