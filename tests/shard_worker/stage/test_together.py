"""Plain torch on rows of several sessions at once against the same sessions alone."""

from __future__ import annotations

import random

import pytest
import torch

from services.model.cached_tensors import PAGE_ROWS
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.features import Features
from shard_worker.stage.loader import CaptureRequest
from shard_worker.stage.stage import Stage, StageState
from tests.shard_worker.tiny import Tiny, ids, load_stage

NAMES = ("qwen3", "qwen3-sliding", "qwen3_5-ratio-3", "qwen3_moe", "gpt_oss", "gemma4")


def step(
    stage: Stage, states: list[StageState], tokens: list[list[int]], uncommitted: list[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits and summed features of each session's next rows."""
    assert stage.head is not None
    features, counts = Features(), [len(row) for row in tokens]
    hidden = stage.embed([token for row in tokens for token in row])
    hidden = stage.run_together(states, counts, hidden, features, uncommitted=uncommitted)
    assert features.total is not None
    logits = stage.head.logits(hidden, states[0].batch_invariant_rows)
    return list(logits.split(counts)), list(features.total.split(counts))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_sessions_are_the_same_alone_and_together(tiny: Tiny, name: str, exact: bool) -> None:
    """Whatever rows of whatever sessions stand in a step: the same but for the last bits in float32, and to the last
    bit in 16 bits where rows are batch-invariant."""
    fc = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)) * 0.1
    dtype = "bfloat16" if exact else "float32"
    stage = load_stage(tiny.path(name), dtype=dtype, capture=CaptureRequest((2, 0), fc.to(getattr(torch, dtype))))
    rows = 16 if exact else None
    draw = random.Random(name)
    tokens = [ids(120, seed=seed) for seed in range(6)]
    alone, together = ([stage.allocate(120, 16, rows) for _ in tokens] for _ in range(2))
    for seed, prompt in enumerate((0, 1, 2, 30, 31, 40)):
        for state in (alone[seed], together[seed]):
            if prompt:
                stage.run(state, stage.embed(tokens[seed][:prompt]), None, uncommitted=False)

    for turn in range(14):
        chosen = draw.sample(range(len(tokens)), draw.randint(2, len(tokens)))
        # All rows count at once, or all of them later; at last some of them.
        uncommitted = [number % 2 == 1 if turn >= 10 else turn % 2 == 1 for number in range(len(chosen))]
        counts = [draw.choice((1, 2, 5, 16)) if later else 1 for later in uncommitted]
        parts = [
            tokens[one][alone[one].length : alone[one].length + count]
            for one, count in zip(chosen, counts, strict=True)
        ]
        found = step(stage, [together[one] for one in chosen], parts, uncommitted)
        for one, part, later, logits, features in zip(chosen, parts, uncommitted, *found, strict=True):
            [expected], [own] = step(stage, [alone[one]], [part], [later])
            if exact:
                assert torch.equal(logits, expected)
                assert torch.equal(features, own)
            else:
                # By the whole: how single numbers near 0 are rounded depends on the processor.
                assert (logits - expected).norm() <= 1e-5 * expected.norm()
                assert (features - own).norm() <= 1e-5 * own.norm()
            if later:
                kept = draw.randint(1, min(len(part), 3))
                for state in (alone[one], together[one]):
                    stage.commit(state, state.length + kept)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding"])
@torch.inference_mode()
def test_rows_on_both_sides_of_a_pages_end(tiny: Tiny, name: str) -> None:
    """A block's rows that stand in two pages are the same to the last bit as one by one in a cache without pages,
    beside another session's, and leave the same behind."""
    stage = load_stage(tiny.path(name), dtype="bfloat16")
    [segment] = stage.segments
    like, before, count = torch.empty(0, dtype=torch.bfloat16), PAGE_ROWS - 5, 9
    tokens = ids(before + count + 1, seed=3)
    alone, other = (stage.allocate(len(tokens), 16, 16) for _ in range(2))
    caches = SegmentCaches.allocate(
        segment.config, segment.layers, segment.key_kinds, len(tokens), 16, like, PAGE_ROWS, row_by_row=True
    )
    paged = StageState(len(tokens), [caches], 16)
    for state in (alone, paged):
        stage.run(state, stage.embed(tokens[:before]), None, uncommitted=False)

    def logits(states: list[StageState], parts: list[list[int]]) -> torch.Tensor:
        assert stage.head is not None
        counts = [len(part) for part in parts]
        hidden = stage.embed([token for part in parts for token in part])
        hidden = stage.run_together(states, counts, hidden, None, uncommitted=[count > 1 for count in counts])
        return stage.head.logits(hidden, 16)

    block = tokens[before:-1]
    expected = torch.cat([logits([alone], [[token]]) for token in block])
    found = logits([other, paged], [tokens[:3], block])[3:]
    assert torch.equal(found, expected)
    stage.commit(paged, before + count)
    assert torch.equal(logits([paged], [tokens[-1:]]), logits([alone], [tokens[-1:]]))
