"""The rows of a step as its layers see them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.model.config import LayerKind, ModelConfig
from services.model.families import read_model_config
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.rows import SessionRows, make_rows
from shard_worker.ops.rope import Rotation
from tests.reference import storage
from tests.shard_worker.tiny import Tiny

WINDOW = 6
KINDS = frozenset({LayerKind.FULL, LayerKind.SLIDING})


@pytest.fixture
def config(tiny: Tiny) -> ModelConfig:
    """Full and sliding layers, two query heads to each key head."""
    config = read_model_config(storage.read_config(tiny.path("qwen3-sliding")))
    return replace(config, sliding_window=WINDOW)


def rows_at(config: ModelConfig, base: int, count: int) -> SessionRows:
    like, caches = torch.empty(0), SegmentCaches(None, None)
    rotations = Rotation.of_all(config.ropes, like.device)
    shapes = config.attention_shapes.values()
    [rows] = make_rows(set(shapes), rotations, like, [SessionRows(base, count, caches, False)]).sessions
    kinds = dict(zip(config.layer_kinds, shapes, strict=True))
    return replace(rows, masks={kind: rows.masks[kinds[kind]] for kind in KINDS})


@pytest.mark.parametrize(("base", "count"), [(0, 1), (0, 9), (3, 4), (5, 1), (6, 1), (20, 1), (20, 5)])
def test_masks_hide_later_rows_and_what_lies_beyond_the_window(config: ModelConfig, base: int, count: int) -> None:
    """Row by row and key by key, causality and window decide, for every head."""
    rows = rows_at(config, base, count)

    assert rows.base == base
    span = base + count
    for kind in KINDS:
        nearest = WINDOW if kind is LayerKind.SLIDING else span
        first = max(0, base + 1 - nearest)
        expected = [
            [key <= query and query - key < nearest for key in range(first, span)]
            for query in range(base, base + count)
        ]
        mask = rows.masks[kind]
        seen = expected if mask is None else (mask == 0).tolist()
        assert seen in (expected, expected * 2)
        assert mask is not None or all(all(line) for line in expected)


def test_a_single_row_needs_no_mask(config: ModelConfig) -> None:
    """It sees all keys that a layer reads for it, those of its window alone included."""
    for base in (5, 6, 40):
        assert rows_at(config, base, 1).masks == {LayerKind.FULL: None, LayerKind.SLIDING: None}
