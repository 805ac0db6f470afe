"""Rotary embedding against complex multiplication in float64, and its scaling against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.model.families import read_model_config
from services.model.rope import Rope
from shard_worker.ops.rope import Rotation, apply_rope, rope_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("rotary_dim", [16, 4])
def test_pairs_turn_by_position_times_frequency(rotary_dim: int) -> None:
    """Elements d and d + rotary_dim / 2 are one complex number, turned by position * theta^(-2d / rotary_dim)."""
    theta, positions = 500.0, torch.tensor([0, 1, 7, 3000])
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))

    own = apply_rope(x, rope_table(positions, Rotation.of(Rope(rotary_dim, theta), CPU), torch.float32))

    half = rotary_dim // 2
    for row, position in enumerate(positions.tolist()):
        for d in range(half):
            angle = torch.tensor(position * theta ** (-2 * d / rotary_dim), dtype=torch.float64)
            turned = torch.complex(x[row, :, d].double(), x[row, :, d + half].double()) * torch.exp(1j * angle)
            torch.testing.assert_close(own[row, :, d].double(), turned.real, rtol=0, atol=2e-4)
            torch.testing.assert_close(own[row, :, d + half].double(), turned.imag, rtol=0, atol=2e-4)


def test_elements_beyond_the_rotary_part_pass_through() -> None:
    """With rotary_dim below head_dim the rest of each head is untouched."""
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    table = rope_table(torch.tensor([5, 6, 7]), Rotation.of(Rope(4, 1e4), CPU), torch.float32)

    own = apply_rope(x, table)

    assert torch.equal(own[..., 4:], x[..., 4:])
    assert not torch.equal(own[..., :4], x[..., :4])


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama 3.1": {**LLAMA3, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama 3.2": {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
    "qwen3": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "attention factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.75,
    },
    "no factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_scaled_frequencies_are_those_of_transformers(name: str, older: bool) -> None:
    """Frequencies and the factor of cos and sin, in both spellings."""
    parameters = {"rope_theta": 1e4, **SCALINGS[name]}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 131072}
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](Qwen3Config(rope_parameters=parameters, **sizes))
    raw: dict[str, Any] = {**sizes, "model_type": "qwen3", "intermediate_size": 8, "vocab_size": 8}
    raw |= {"num_hidden_layers": 1}
    if older:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        scaling["type"] = scaling.pop("rope_type")
        raw |= {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}
    else:
        raw |= {"rope_parameters": parameters}

    rotation = Rotation.of(read_model_config(raw).rope, CPU)

    torch.testing.assert_close(rotation.frequencies, frequencies, rtol=3e-7, atol=0)
    assert rotation.factor == pytest.approx(factor, rel=1e-12)
    plain = Rotation.of(Rope(64, parameters["rope_theta"]), CPU)
    assert not torch.allclose(plain.frequencies, frequencies)
    cos, sin = rope_table(torch.tensor([5]), rotation, torch.float32)
    torch.testing.assert_close(cos[0, 0, :32], (5 * frequencies).cos() * factor)
    torch.testing.assert_close(sin[0, 0, 32:], (5 * frequencies).sin() * factor)
