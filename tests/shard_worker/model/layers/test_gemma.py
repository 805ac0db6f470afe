"""Gemma: the math of its layers against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import GEMMA3, GEMMA4, Tiny, ids, unsplit

STEPS = [(family_runner.check_steps, name) for name in (*GEMMA3, *GEMMA4)]
OTHERS = [
    (family_runner.check_commits, "gemma3-untied"),
    (family_runner.check_commits, "gemma4-experts"),
    (family_runner.check_chunks, "gemma3"),
    (family_runner.check_chunks, "gemma4"),
]


@pytest.mark.parametrize(("check", "name"), [*STEPS, *OTHERS])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Tied and untied heads, capped logits, heads and RoPE of both kinds of layers, windows shorter than a block, keys
    that are values, and experts beside a dense part, by every way of running them."""
    check(tiny, name)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_the_text_part_of_a_model_with_a_tower_is_served(tiny: Tiny, name: str) -> None:
    """Under the names that published files have; what is the tower's is left out."""
    assert torch.equal(unsplit(tiny.path(f"{name}-nested"))(ids(30)), unsplit(tiny.path(name))(ids(30)))
