"""The matrices that `flashsplit bench products` multiplies."""

from __future__ import annotations

import pytest
import torch

from shard_worker.measure import products
from shard_worker.measure.products import Q4_K_M, Matrix, Products
from shard_worker.weights.packed import Codes, PackedWeight
from shard_worker.weights.weight import StackedWeight

CPU = torch.device("cpu")


@pytest.mark.parametrize("packing", [None, "q8_0", Q4_K_M])
def test_matrices_come_layer_by_layer(packing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head comes last; the mix has wider codes for it and for every other one of those that files keep wider."""
    shape = (Matrix("qkv", 1536, 512, 2), Matrix("down", 256, 512, 2, added=True), Matrix("head", 64, 512, 1))
    monkeypatch.setitem(products.SHAPES, "tiny", shape)
    made = Products("tiny", packing, CPU, torch.bfloat16)
    ordered = made.layer_by_layer()
    assert [matrix.name for matrix, _ in ordered] == ["qkv", "down", "qkv", "down", "head"]
    assert made.nbytes == sum(weight.nbytes for _, weight in ordered)
    weights = [weight for _, weight in ordered]
    if packing is None:
        assert made.nbytes == 2 * 512 * (2 * 1536 + 2 * 256 + 64)
    elif packing == "q8_0":
        assert made.nbytes == 512 * (2 * 1536 + 2 * 256 + 64) * 34 // 32
    else:
        kinds = [weight.packing.codes if isinstance(weight, PackedWeight) else None for weight in weights]
        assert kinds == [Codes.BITS4, Codes.BITS4, None, Codes.INT8, Codes.INT8]
        assert isinstance(weights[2], StackedWeight)
