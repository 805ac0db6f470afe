"""Gemma: the math of its layers against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import GEMMA3, Tiny, ids, unsplit

STEPS = [(family_runner.check_steps, name) for name in GEMMA3]
OTHERS = [(family_runner.check_commits, "gemma3-untied"), (family_runner.check_chunks, "gemma3")]


@pytest.mark.parametrize(("check", "name"), [*STEPS, *OTHERS])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Tied and untied heads, capped logits, RoPE of both kinds of layers, and windows shorter than a block, by every
    way of running them."""
    check(tiny, name)


def test_the_text_part_of_a_model_with_a_tower_is_served(tiny: Tiny) -> None:
    """Under the names that published files have; what is the tower's is left out."""
    assert torch.equal(unsplit(tiny.path("gemma3-nested"))(ids(30)), unsplit(tiny.path("gemma3"))(ids(30)))
