"""Qwen3.5: the engine's math against transformers, and what its config may say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from shard_worker.model.families import qwen3_5
from tests.reference import checkpoints, storage, target
from tests.shard_worker.model.families import family_runner
from tests.shard_worker.tiny import QWEN3_5, Tiny, ids, unsplit

FULL, LINEAR = LayerKind.FULL, LayerKind.LINEAR


@pytest.mark.parametrize("name", QWEN3_5)
@pytest.mark.parametrize("check", [family_runner.check_steps, family_runner.check_commits, family_runner.check_chunks])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Key:value head ratios 1 to 3, nested and biased checkpoints give transformers' logits by every way."""
    check(tiny, name)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_short_prompts_fill_the_convolution(tiny: Tiny, length: int) -> None:
    """After a prompt as short as the convolution, state, inputs and the next tokens' logits are transformers'."""
    name, tokens = "qwen3_5-ratio-3", ids(length + 6)
    model = tiny.model(name)
    run = unsplit(tiny.path(name))
    run(tokens[:length])

    for layer, (conv, state) in target.recurrent_states(model, tokens[:length]).items():
        own_conv, own_state = run.recurrent(layer)
        torch.testing.assert_close(own_conv, conv, rtol=0, atol=2e-5)
        torch.testing.assert_close(own_state, state, rtol=0, atol=2e-5)
    rows = torch.cat([run([token]) for token in tokens[length:]])
    torch.testing.assert_close(rows, target.logits(model, tokens)[length:], **family_runner.TOLERANCE)


def test_extreme_weights_stay_exact(tmp_path: Path) -> None:
    """Keys next to zero, states that vanish at once and states that never decay are as in transformers."""
    path = checkpoints.write_qwen3_5(tmp_path / "m", layers=4)

    def push(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.linear_attn.in_proj_qkv.weight"][:64] *= 1e-4
        tensors["model.layers.1.linear_attn.A_log"].fill_(10.0)
        tensors["model.layers.2.linear_attn.A_log"].fill_(-30.0)

    storage.edit_tensors(path, push)
    tokens = ids(90)
    expected = target.logits(target.load(path), tokens)
    run = unsplit(path)

    rows = torch.cat((run(tokens[:70]), run(tokens[70:71]), run.verify(tokens[71:87])))

    torch.testing.assert_close(rows, expected[:87], **family_runner.TOLERANCE)


def read(tiny: Tiny, **changes: Any) -> ModelConfig:
    """The shape that a checkpoint's config gives once some keys are changed; None removes a key."""
    raw = storage.read_config(tiny.path("qwen3_5")) | changes
    return qwen3_5.read_config({key: value for key, value in raw.items() if value is not None})


def test_every_fourth_layer_has_attention_unless_said_otherwise(tiny: Tiny) -> None:
    """Without layer_types, full_attention_interval (by default 4) places the attention layers."""
    assert read(tiny, layer_types=None).layer_kinds == (LINEAR, LINEAR, LINEAR, FULL) * 2
    spread = read(tiny, layer_types=None, full_attention_interval=2)
    assert spread.layer_kinds == (LINEAR, FULL) * 4


def test_a_quarter_of_a_head_rotates_unless_said_otherwise(tiny: Tiny) -> None:
    """partial_rotary_factor counts in rope_parameters and at the top level, and is a quarter without either."""
    rope = {"rope_type": "default", "rope_theta": 1e4}

    assert read(tiny, rope_parameters=rope).rotary_dim == 8
    assert read(tiny, rope_parameters=rope, partial_rotary_factor=0.5).rotary_dim == 16
    assert read(tiny, rope_parameters=rope | {"partial_rotary_factor": 1.0}).rotary_dim == 32


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"attn_output_gate": False}, Unimplemented, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, Unimplemented, "output_gate_type"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, Unimplemented, "rope_type"),
        ({"partial_rotary_factor": 0.01, "rope_parameters": None}, InvalidArgument, "partial_rotary_factor"),
        ({"linear_num_value_heads": 3}, InvalidArgument, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, InvalidArgument, "linear_conv_kernel_dim"),
        ({"num_key_value_heads": 3}, InvalidArgument, "num_attention_heads"),
        ({"layer_types": ["sliding_attention"] * 8}, InvalidArgument, "layer_types"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    tiny: Tiny, changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(tiny, **changes)

    assert caught.value.where["field"] == field
