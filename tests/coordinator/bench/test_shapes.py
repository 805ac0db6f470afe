"""Published shapes: what they count, and that a stage of one computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from coordinator.bench.checkpoints import CheckpointOptions
from coordinator.bench.shapes import DRAFT_KINDS, TARGETS, draft_config, write_shape
from services.errors import InvalidArgument
from services.model.families import read_model_config
from services.model.random_weights import random_headers
from shard_worker.device.devices import parse_devices
from shard_worker.drafting.drafters.dflash import load
from shard_worker.weights.opening import open_checkpoint
from tests.shard_worker.tiny import ignore_progress
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
    "gemma-4-26b-a4b": 25.2,
    "glm-4.5-air": 106.8,
}
"""Parameters, without towers."""


@pytest.mark.parametrize("shape", TARGETS)
def test_shapes_have_as_many_parameters_as_the_models(shape: str) -> None:
    """Of all tensors; a draft of theirs is read, too."""
    config = {**TARGETS[shape], "random_weights": True}
    assert read_model_config(config).num_layers == draft_config(shape)["num_target_layers"]
    count = sum(math.prod(header.shape) for header in random_headers(config).values())
    assert count == pytest.approx(BILLIONS[shape] * 1e9, rel=0.01)


@pytest.mark.parametrize("shape", ["gemma-4-31b", "gemma-4-26b-a4b"])
def test_a_narrow_gemma_computes(shape: str, tmp_path: Path) -> None:
    """Layers of both kinds, the full one with wider heads whose values are its keys, in a narrower residual stream; and
    experts beside a dense part."""
    path, _ = write_shape(shape, tmp_path)
    config = json.loads((path / "config.json").read_text())
    narrow = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 4}
    narrow |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    (path / "config.json").write_text(json.dumps({**config, **narrow}))
    assert_computes(path)


@pytest.mark.parametrize(
    ("kind", "vocabulary"), [(kind, None) for kind in DRAFT_KINDS] + [("dflash", 100), ("dspark", 100)]
)
def test_a_narrow_draft_of_each_kind_is_loaded(kind: str, vocabulary: int | None, tmp_path: Path) -> None:
    """Of random weights, with blocks of as many rows; those that propose few tokens have them spread over all."""
    config = draft_config("qwen3-0.6b", kind, vocabulary)
    narrow = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 1}
    narrow |= {"layer_types": ["full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {**narrow, "num_target_layers": 28, "random_weights": True}
    config["dflash_config"]["mask_token_id"] = 255
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = load(open_checkpoint(tmp_path, "--draft"), parse_devices("cpu")[0], None, ignore_progress)
    assert draft.config.layout.lower() == kind
    assert draft.config.block_size == 16
    assert (draft.own_head is None) == (vocabulary is None)
    if draft.own_head is not None:
        named = draft.own_head.named(torch.arange(100))
        assert len(named.unique()) == 100
        assert named.max() > 250


@pytest.mark.parametrize(
    ("options", "drafting", "says"),
    [
        ({"draft_kind": "dspark"}, ("draft",), "--draft-kind dspark is for the draft of a --shape"),
        ({"shape": "qwen3-0.6b", "draft_vocabulary": 9}, (), "--draft-vocabulary 9 is for the draft"),
        (
            {"shape": "qwen3-0.6b", "draft_vocabulary": 9, "draft_kind": "dflash2"},
            ("draft",),
            "a DFlash2 draft proposes all tokens",
        ),
        ({"shape": "qwen3-0.6b", "draft_vocabulary": 151936}, ("cycle",), "qwen3-0.6b has 151936 tokens"),
    ],
)
def test_what_a_shapes_draft_cannot_be_is_refused(
    options: dict[str, object], drafting: tuple[str, ...], says: str
) -> None:
    """Before anything is written."""
    asked = CheckpointOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=says), asked.directories(drafting):
        pass
