"""Llama and Mistral: the math of their layers against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import LLAMA, Tiny


@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("check", [family_runner.check_steps, family_runner.check_commits, family_runner.check_chunks])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Tied and untied heads, biases of attention and SwiGLU, scaled RoPE and windows, by every way of running them."""
    check(tiny, name)
