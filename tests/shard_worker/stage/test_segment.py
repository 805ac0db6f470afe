"""A segment's steps over caches that grow page by page, as on a GPU, tried on the CPU; test_stage.py has the others."""

from __future__ import annotations

import gc

import pytest
import torch

from services.errors import ResourceExhausted
from shard_worker.device.devices import parse_devices
from shard_worker.model.features import Features
from shard_worker.stage.loader import CaptureRequest
from tests.reference import target
from tests.shard_worker.model.layers.family_runner import TOLERANCE
from tests.shard_worker.tiny import AS_GPU, Run, Tiny, ids, load_stage


@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding", "qwen3_5-ratio-3", "gemma4"])
def test_steps_over_pages_have_the_same_logits(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Pages come as they are needed, and a step may begin, end and look back anywhere in them."""
    monkeypatch.setattr("shard_worker.stage.segment.PAGE_ROWS", 16)
    tokens = ids(60)
    expected = target.logits(tiny.model(name), tokens)
    run = Run([load_stage(tiny.path(name), devices=[AS_GPU])], capacity=640)

    rows = [run(tokens[:20]), run(tokens[20:33]), *(run([token]) for token in tokens[33:40]), run.verify(tokens[40:48])]
    [caches] = run.states[0].caches
    assert caches.attention is not None
    assert len(caches.attention.pages) == 3
    run.commit(3)
    rows.append(run.verify(tokens[43:56]))
    expected = torch.cat((expected[:48], expected[43:56]))

    torch.testing.assert_close(torch.cat(rows), expected, **TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", "as gpu"])
def test_a_session_of_so_many_tokens_finds_memory_and_a_longer_one_does_not(tiny: Tiny, device: str) -> None:
    """In a pool of any size, by pages and without them; layers without keys and values have no bound."""
    [devices] = [[AS_GPU] if device == "as gpu" else parse_devices("cpu")]
    for size in (300_000, 1_000_000):
        stage = load_stage(tiny.path("qwen3_5"), devices=devices)
        [segment] = stage.segments
        assert stage.session_tokens is None
        segment.pool.take(size, None)
        tokens = stage.session_tokens
        assert tokens is not None
        assert tokens > 100
        segment.allocate(tokens, 16).reserve(tokens)
        gc.collect()
        assert segment.pool.used_bytes == 0
        with pytest.raises(ResourceExhausted):
            segment.allocate(tokens + 1, 16).reserve(tokens + 1)
    linear = load_stage(tiny.path("qwen3_5"), (0, 1))
    linear.segments[0].pool.take(1000, None)
    assert linear.session_tokens is None


def test_segments_hand_on_hidden_rows_and_features(tiny: Tiny) -> None:
    """Devices of either kind may follow each other in one stage."""
    tokens = ids(30)
    fc = torch.randn(64, 128, generator=torch.Generator().manual_seed(7)) / 16
    [cpu] = load_stage(tiny.path("qwen3_5"), (0, 1)).segments
    stage = load_stage(tiny.path("qwen3_5"), devices=[AS_GPU, cpu.device], capture=CaptureRequest((6, 1), fc))
    features = Features()

    rows = Run([stage])(tokens, features)

    joined = torch.cat(target.block_outputs(tiny.model("qwen3_5"), tokens, (6, 1)), -1)
    torch.testing.assert_close(rows, target.logits(tiny.model("qwen3_5"), tokens), **TOLERANCE)
    assert features.total is not None
    torch.testing.assert_close(features.total, joined @ fc.T, rtol=0, atol=2e-4)
