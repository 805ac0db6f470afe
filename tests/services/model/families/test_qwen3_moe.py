"""Qwen3 with experts: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from services.model.families import qwen3_moe
from services.model.layers import layer_shapes
from tests.services.model.families import test_qwen3

RAW: dict[str, Any] = {
    **{key: value for key, value in test_qwen3.RAW.items() if key != "layer_types"},
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return qwen3_moe.read_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_which_layers_have_experts() -> None:
    """All of them, but for every so many, and those that are named."""

    def sparse(**changes: Any) -> list[int]:
        config = read(**changes)
        return [layer for layer in range(4) if config.feed_forward(layer) == "experts"]

    assert sparse() == sparse(mlp_only_layers=None, decoder_sparse_step=None) == [0, 1, 2, 3]
    assert sparse(decoder_sparse_step=2) == [1, 3]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == [1]
    config = read(mlp_only_layers=[0])
    assert layer_shapes(config, 0)["mlp.up_proj.weight"] == (128, 64)
    assert layer_shapes(config, 1)["mlp.experts.7.up_proj.weight"] == (32, 64)
    assert layer_shapes(config, 1)["mlp.gate.weight"] == (8, 64)


def test_a_window_is_one_of_all_layers() -> None:
    """Unlike the dense family's, which begins at a layer."""
    assert read(use_sliding_window=True, sliding_window=6, max_window_layers=3).layer_kinds == (LayerKind.SLIDING,) * 4


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"num_experts_per_tok": 9}, InvalidArgument, "num_experts_per_tok"),
        ({"num_experts": 0}, InvalidArgument, "num_experts"),
        ({"moe_intermediate_size": -1}, InvalidArgument, "moe_intermediate_size"),
        ({"norm_topk_prob": 1}, InvalidArgument, "norm_topk_prob"),
        ({"mlp_only_layers": ["first"]}, InvalidArgument, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, InvalidArgument, "decoder_sparse_step"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
