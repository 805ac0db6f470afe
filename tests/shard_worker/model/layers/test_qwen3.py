"""Qwen3: the math of its layers against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import QWEN3, Tiny


@pytest.mark.parametrize("name", QWEN3)
@pytest.mark.parametrize("check", [family_runner.check_steps, family_runner.check_commits, family_runner.check_chunks])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Tied, untied, sliding and biased checkpoints give transformers' logits by every way of running them."""
    check(tiny, name)
