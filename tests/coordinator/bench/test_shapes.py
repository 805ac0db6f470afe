"""Published shapes: what they count, and that a stage of one computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from coordinator.bench.shapes import TARGETS, draft_config, write_shape
from services.model.families import read_model_config
from services.model.random_weights import random_headers
from tests.shard_worker.weights.test_random_checkpoint import assert_computes

BILLIONS = {
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "llama-3.1-8b": 8.03,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "qwen3.5-35b-a3b": 34.7,
    "qwen3.5-9b": 8.95,
    "qwen3.6-27b": 26.9,
    "gemma-4-31b": 30.7,
}
"""Parameters, without towers."""


@pytest.mark.parametrize("shape", TARGETS)
def test_shapes_have_as_many_parameters_as_the_models(shape: str) -> None:
    """Of all tensors; a draft of theirs is read, too."""
    config = {**TARGETS[shape], "random_weights": True}
    assert read_model_config(config).num_layers == draft_config(shape)["num_target_layers"]
    count = sum(math.prod(header.shape) for header in random_headers(config).values())
    assert count == pytest.approx(BILLIONS[shape] * 1e9, rel=0.01)


def test_a_narrow_gemma_computes(tmp_path: Path) -> None:
    """Layers of both kinds, the full one with wider heads whose values are its keys, in a narrower residual stream."""
    path, _ = write_shape("gemma-4-31b", tmp_path)
    config = json.loads((path / "config.json").read_text())
    narrow = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 4}
    narrow |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    (path / "config.json").write_text(json.dumps({**config, **narrow}))
    assert_computes(path)
