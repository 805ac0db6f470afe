"""Laguna against transformers: gates of heads, heads that differ by layer, and routers of sigmoids."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.model.families import read_model_config
from tests.reference import storage
from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import LAGUNA, Tiny

STEPS = [(family_runner.check_steps, name) for name in LAGUNA]
OTHERS = [(family_runner.check_commits, "laguna")]


@pytest.mark.parametrize(("check", "name"), [*STEPS, *OTHERS])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Gates of heads and of elements, numbers of heads that differ and that do not, RoPE of each kind of layers, dense
    layers, scaled and capped routers, and windows shorter than a block."""
    check(tiny, name)


def test_layers_are_of_the_heads_that_are_said(tiny: Tiny) -> None:
    """Each its own, with the same keys and values."""
    config = read_model_config(storage.read_config(tiny.path("laguna")))

    assert [config.attention(layer).heads for layer in range(4)] == [4, 6, 4, 2]
    assert {config.attention(layer).kv_heads for layer in range(4)} == {2}
    assert [config.attention(layer).window for layer in range(4)] == [None, 6, 6, None]
    assert [config.attention(layer).rope.rotary_dim for layer in range(4)] == [8, 16, 16, 8]
