"""Which matrices `--quantize` packs, and what it makes of their headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.errors import InvalidArgument
from services.model.quantization import Quantization, QuantizedTo
from services.model.tensor_headers import PackedMatrix, TensorHeader

HEADERS = {
    "model.layers.0.self_attn.q_proj.weight": TensorHeader("BF16", (256, 384)),
    "model.layers.0.self_attn.q_proj.bias": TensorHeader("BF16", (256,)),
    "model.layers.0.mlp.down_proj.weight": TensorHeader("F32", (384, 192)),
    "model.layers.1.linear_attn.in_proj_qkv.weight": TensorHeader("BF16", (256, 384)),
    "model.layers.1.linear_attn.in_proj_a.weight": TensorHeader("BF16", (4, 384)),
    "model.layers.1.linear_attn.in_proj_b.weight": TensorHeader("BF16", (4, 384)),
    "model.layers.1.linear_attn.out_proj.weight": TensorHeader("BF16", (384, 96)),
    "model.layers.1.mlp.up_proj.weight": TensorHeader("BF16", (384, 72)),
    "model.layers.1.input_layernorm.weight": TensorHeader("BF16", (384,)),
    "model.embed_tokens.weight": TensorHeader("BF16", (1024, 384)),
    "lm_head.weight": TensorHeader("BF16", (1024, 384)),
    "fc.weight": TensorHeader("BF16", (384, 1152)),
}
ENDS = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("to", QuantizedTo)
@pytest.mark.parametrize("ends", [False, True])
def test_the_projections_of_layers_are_packed(to: QuantizedTo, ends: bool) -> None:
    """With as wide groups as their columns allow, and the ends only where that is asked for; all else stays."""
    found = Quantization(to, ends).headers(HEADERS, Path("/models/m"), "--quantize")
    packed = {name: header.packed for name, header in found.items() if header.packed is not None}
    groups = {
        "model.layers.0.self_attn.q_proj.weight": 128,
        "model.layers.0.mlp.down_proj.weight": 64,
        "model.layers.1.linear_attn.in_proj_qkv.weight": 128,
        **({} if to is QuantizedTo.INT4 else {"model.layers.1.linear_attn.out_proj.weight": 32}),
        **(dict.fromkeys(ENDS, 128) if ends else {}),
    }
    assert {name: one.group for name, one in packed.items()} == groups
    assert {name: header for name, header in found.items() if name not in packed} == {
        name: header for name, header in HEADERS.items() if name not in groups
    }
    assert {header.shape for header in found.values()} == {header.shape for header in HEADERS.values()}
    query = packed["model.layers.0.self_attn.q_proj.weight"]
    assert query.stored_bytes == 256 * 384 * 2
    assert query.loaded_bytes == 256 * 384 * to.bits // 8 + 256 * 3 * 2


def test_packed_checkpoints_are_refused() -> None:
    """By the name of a matrix, of what it is packed in and of the option."""
    packed = PackedMatrix("awq", 4, 128, 100, 100)
    headers = HEADERS | {"model.layers.1.mlp.up_proj.weight": TensorHeader("awq", (384, 72), packed)}
    with pytest.raises(InvalidArgument) as caught:
        Quantization(QuantizedTo.FP8).headers(headers, Path("/models/m"), "--quantize-draft")
    assert caught.value.where["field"] == "--quantize-draft"
    for word in ("--quantize-draft fp8", "model.layers.1.mlp.up_proj.weight in /models/m", "as awq"):
        assert word in caught.value.message


def test_every_packing_has_a_fingerprint_of_its_own() -> None:
    """Beside the checkpoint's, and another for another checkpoint."""
    packings = [Quantization(to, ends) for to in QuantizedTo for ends in (False, True)]
    found = {packing.fingerprint(checkpoint) for packing in packings for checkpoint in ("a", "b")}
    assert len(found | {"a", "b"}) == 2 * len(packings) + 2
