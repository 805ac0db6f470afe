"""Qwen3.5 with experts and Qwen3-Next: what their config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.families import read_model_config
from services.model.layers import layer_shapes
from services.model.stored_experts import ExpertPart, experts_apart
from services.model.tensor_headers import TensorHeader
from tests.services.model.families import test_qwen3_5

RAW: dict[str, Any] = {
    **{key: value for key, value in test_qwen3_5.RAW.items() if key != "intermediate_size"},
    "model_type": "qwen3_5_moe",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
NEXT = RAW | {"model_type": "qwen3_next"}


def test_a_shared_expert_stands_beside_the_routed_ones() -> None:
    """With a gate of one row; Qwen3.5's shares sum up to 1 whatever, Qwen3-Next's unless it says otherwise."""
    shapes = layer_shapes(read_model_config(RAW), 0)
    assert shapes["mlp.shared_expert.down_proj.weight"] == (64, 48)
    assert shapes["mlp.shared_expert_gate.weight"] == (1, 64)
    experts = [read_model_config(raw).experts for raw in (RAW, NEXT, NEXT | {"norm_topk_prob": False})]
    assert [one.normalised for one in experts if one is not None] == [True, True, False]
    some = read_model_config(NEXT | {"mlp_only_layers": [0], "intermediate_size": 96})
    assert layer_shapes(some, 0)["mlp.up_proj.weight"] == (96, 64)


def test_projections_of_qwen3_next_are_grouped() -> None:
    """Two matrices in place of four."""
    shapes = layer_shapes(read_model_config(NEXT), 0)
    apart = layer_shapes(read_model_config(RAW), 0)
    rows = {part: apart[f"linear_attn.in_proj_{part}.weight"][0] for part in ("qkv", "z", "b", "a")}

    assert shapes["linear_attn.in_proj_qkvz.weight"] == (rows["qkv"] + rows["z"], 64)
    assert shapes["linear_attn.in_proj_ba.weight"] == (rows["b"] + rows["a"], 64)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"norm_topk_prob": False}, Unimplemented, "norm_topk_prob"),
        ({"num_experts_per_tok": 9}, InvalidArgument, "num_experts_per_tok"),
        ({"shared_expert_intermediate_size": 0}, InvalidArgument, "shared_expert_intermediate_size"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read_model_config(RAW | changes)

    assert caught.value.where["field"] == field


def test_experts_together_are_found_one_by_one() -> None:
    """Gates before ups. Where there are biases, both alternate, and matrices are transposed; those of MXFP4 are not."""
    start = "model.layers.0.mlp.experts."
    fused = {
        f"{start}gate_up_proj": TensorHeader("BF16", (2, 6, 4)),
        f"{start}down_proj": TensorHeader("BF16", (2, 4, 3)),
    }

    headers, parts = experts_apart(fused)

    assert {name.removeprefix(start): header.shape for name, header in headers.items()} == {
        f"{expert}.{part}.weight": (4, 3) if part == "down_proj" else (3, 4)
        for expert in range(2)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    assert parts[f"{start}1.up_proj.weight"] == ExpertPart(f"{start}gate_up_proj", 1, slice(3, 6))
    both, down = f"{start}gate_up_proj", f"{start}down_proj"
    biases = {f"{both}_bias": TensorHeader("BF16", (2, 6)), f"{down}_bias": TensorHeader("BF16", (2, 4))}
    dense = {both: TensorHeader("BF16", (2, 4, 6)), down: TensorHeader("BF16", (2, 3, 4))}
    headers, parts = experts_apart(dense | biases)
    assert headers[f"{start}0.up_proj.weight"].shape == (3, 4)
    assert headers[f"{start}0.down_proj.weight"].shape == (4, 3)
    assert headers[f"{start}1.down_proj.bias"].shape == (4,)
    assert parts[f"{start}1.up_proj.weight"] == ExpertPart(both, 1, slice(1, 6, 2), transposed=True)
    assert parts[f"{start}1.up_proj.bias"] == ExpertPart(f"{both}_bias", 1, slice(1, 6, 2))
    packed = {f"{both}_blocks": TensorHeader("U8", (2, 6, 3, 16)), f"{both}_scales": TensorHeader("U8", (2, 6, 3))}
    headers, parts = experts_apart(packed | biases)
    assert headers[f"{start}1.gate_proj.blocks"].shape == (3, 48)
    assert headers[f"{start}1.gate_proj.scales"].shape == (3, 3)
    assert parts[f"{start}1.gate_proj.blocks"] == ExpertPart(f"{both}_blocks", 1, slice(0, 6, 2))
