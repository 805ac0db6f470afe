"""Attention keys and values in 8-bit floats: what attends to them, what they take, where they cannot be kept."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.errors import FailedPrecondition, InvalidArgument
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.device.devices import Device
from shard_worker.ops.attention import attend, attend_each, grouped_mask, visibility
from shard_worker.ops.float8 import FLOAT8
from tests.reference import float8, target
from tests.shard_worker.tiny import Run, Tiny, ids, load_split, load_stage, unsplit

NAME = "float8_e4m3fn"
HEADS, KV_HEADS, DIM, TOTAL = 4, 2, 8, 40


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> np.ndarray:
    """Attention of the last positions, in float64, over what e4m3 makes of keys and values [n, kv_heads, dim]."""
    count, seen = len(queries), len(keys)
    k, v = (float8.rounded(rows).double().numpy().repeat(HEADS // KV_HEADS, 1) for rows in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries.double().numpy(), k) / DIM**0.5
    distance = np.arange(seen - count, seen)[:, None] - np.arange(seen)[None, :]
    scores[:, (distance < 0) | (distance >= (window or seen))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)


@pytest.mark.parametrize("page_rows", [None, 8])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_attend_to_what_is_kept(page_rows: int | None, window: int | None, dtype: torch.dtype) -> None:
    """In a block and one by one, over one page and many: the rows of the step themselves are rounded too."""
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(5, HEADS, DIM, generator=generator).to(dtype)
    keys, values = (torch.randn(TOTAL, KV_HEADS, DIM, generator=generator).mul(3).to(dtype) for _ in range(2))
    cache = AttentionCache(2, KV_HEADS, TOTAL, DIM, queries, page_rows, dtype=FLOAT8)
    for first, last in ((0, 30), (30, 35), (35, TOTAL)):
        cache.store(1, first, keys[first:last], values[first:last])

    span = cache.span(1, 0, TOTAL)
    positions = torch.arange(TOTAL)
    mask = grouped_mask(visibility(positions[-5:], positions, causal=True, window=window), HEADS // KV_HEADS, dtype)
    expected = torch.from_numpy(attended(queries, keys, values, window))
    tolerance = {"rtol": 0.0, "atol": 1e-5 if dtype is torch.float32 else 5e-2}
    assert span[0].dtype is dtype
    torch.testing.assert_close(attend(queries, *span, mask).double(), expected, **tolerance)
    torch.testing.assert_close(attend_each(queries, *span, window).double(), expected, **tolerance)


@pytest.mark.parametrize("page_rows", [None, 8])
def test_what_is_kept_is_put_back_as_it_is(page_rows: int | None) -> None:
    """Views read and write the bytes themselves: no second rounding, and nothing of it is wider."""
    rows = torch.randn(2, TOTAL, KV_HEADS, DIM, generator=torch.Generator().manual_seed(3))
    one, other = (AttentionCache(1, KV_HEADS, TOTAL, DIM, rows, page_rows, dtype=FLOAT8) for _ in range(2))
    one.store(0, 0, *rows)
    for which in (0, 1):
        read = AttentionView(one, slice(None), which).read(3, 33)
        assert read.dtype is FLOAT8
        assert read[0].transpose(0, 1).reshape(30, -1).view(torch.uint8).numpy().tolist() == (
            float8.nearest(rows[which, 3:33].reshape(30, -1).numpy()).tolist()
        )
        AttentionView(other, slice(None), which).write(read.clone(), 3, 33)
        assert AttentionView(one, slice(None), which).read(7, 7).dtype is FLOAT8

    other.reserve(TOTAL)
    for own, expected in zip(other.span(0, 0, 33), one.span(0, 0, 33), strict=True):
        assert torch.equal(own[:, 3:], expected[:, 3:])


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3)])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding", "qwen3-bias", "qwen3_5-ratio-2"])
def test_logits_are_those_of_rounded_keys_and_values(tiny: Tiny, name: str, cuts: tuple[int, ...]) -> None:
    """Of transformers, told to round them: by a prompt, single rows and verifies of which a part counts, in one stage
    and several. Apart from what a number right between two changes when it falls to the other side."""
    tokens = ids(60)
    cuts = tuple(cut for cut in cuts if cut < load_stage(tiny.path(name)).config.num_layers)
    run = Run(load_split(tiny.path(name), cuts, kv_dtype=NAME))
    rows = [run(tokens[:30]), *(run([token]) for token in tokens[30:40])]
    for first, count, kept in ((40, 12, 7), (47, 13, 13)):
        rows.append(run.verify(tokens[first : first + count])[:kept])
        run.commit(kept)

    found, expected = torch.cat(rows), float8.logits(tiny.model(name), tokens)
    effect = (expected - target.logits(tiny.model(name), tokens)).norm()
    assert effect > 0.005 * expected.norm()
    assert (found - expected).norm() < 0.05 * effect


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_alone_take_less(tiny: Tiny, dtype: str) -> None:
    """A quarter of float32, half of bfloat16; recurrent state keeps its type, in sessions and in what is kept."""
    wide, narrow = (load_stage(tiny.path("qwen3_5"), dtype=dtype, kv_dtype=kept) for kept in (None, NAME))
    ([one], [other]) = (stage.allocate(100, 8).caches for stage in (wide, narrow))
    share = {"float32": 4, "bfloat16": 2}[dtype]

    assert one.attention is not None
    assert other.attention is not None
    assert one.attention.size_bytes == share * other.attention.size_bytes
    assert one.size_bytes - one.attention.size_bytes == other.size_bytes - other.attention.size_bytes
    for group, less in zip(wide.state_groups(), narrow.state_groups(), strict=True):
        assert group.names == less.names
        attention = group.names[0].endswith((".k", ".v"))
        assert less.dtype is (FLOAT8 if attention else group.dtype)
        assert group.size_bytes(0, 60) == less.size_bytes(0, 60) * (share if attention else 1)
    dense = [load_stage(tiny.path("qwen3"), dtype=dtype, kv_dtype=kept).allocate(100, 8) for kept in (None, NAME)]
    assert dense[0].size_bytes == share * dense[1].size_bytes


def test_a_type_that_they_cannot_have_is_refused(tiny: Tiny) -> None:
    """By field, value and what is accepted."""
    with pytest.raises(InvalidArgument, match="kv_dtype 'float16' is not float8_e4m3fn") as caught:
        unsplit(tiny.path("qwen3"), kv_dtype="float16")

    assert caught.value.where["field"] == "kv_dtype"


def test_the_refusal_comes_before_any_weights(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage on a GPU that has another 8-bit type is not begun to load."""
    # What is known of a GPU is kept, so this one has a number that no other test uses.
    gpu = Device("hip:7", torch.device("cuda", 7))
    described = SimpleNamespace(
        gcnArchName="gfx90a:sramecc+", multi_processor_count=104, shared_memory_per_block=1 << 16
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: described)

    with pytest.raises(FailedPrecondition, match="--kv-dtype fp8: hip:7 cannot .* gfx90a") as caught:
        load_stage(tiny.path("qwen3"), devices=[gpu], kv_dtype=NAME)
    assert caught.value.where["field"] == "kv_dtype"
