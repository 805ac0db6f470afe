"""Llama and Mistral: the math of their layers against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import LLAMA, Tiny

STEPS = [(family_runner.check_steps, name) for name in LLAMA]
OTHERS = [(family_runner.check_commits, "llama"), (family_runner.check_chunks, "mistral-sliding")]


@pytest.mark.parametrize(("check", "name"), [*STEPS, *OTHERS])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Tied and untied heads, biases of attention and SwiGLU, scaled RoPE and windows, by every way of running them."""
    check(tiny, name)
