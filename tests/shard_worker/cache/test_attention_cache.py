"""Keys and values in pages and rings: what is stored at a position is read there, wherever it lies."""

from __future__ import annotations

import os

import pytest
import torch

from shard_worker.cache.attention_cache import AttentionCache, AttentionView

LAYERS, HEADS, DIM, TOTAL = 3, 2, 4, 40
TOLD = torch.arange(LAYERS * 2 * HEADS * TOTAL * DIM, dtype=torch.float32).view(LAYERS, 2, HEADS, TOTAL, DIM)


def filled(cache: AttentionCache, length: int, step: int) -> AttentionCache:
    """A cache that was told of the first positions, `step` at a time."""
    for first in range(0, length, step):
        last = min(first + step, length)
        for layer in range(LAYERS):
            keys, values = TOLD[layer, :, :, first:last].transpose(1, 2)
            cache.store(layer, first, keys, values)
    return cache


@pytest.mark.parametrize("page_rows", [None, 1, 8, 16])
@pytest.mark.parametrize("step", [1, 5, 40])
def test_rows_are_read_where_they_were_stored(page_rows: int | None, step: int) -> None:
    """By position, in views of several layers, and as a span from the first one on."""
    cache = filled(AttentionCache(LAYERS, HEADS, TOTAL, DIM, TOLD, page_rows), TOTAL, step)

    for which in (0, 1):
        for first, last in ((0, 40), (3, 9), (7, 8), (15, 33), (9, 9)):
            view = AttentionView(cache, slice(1, 3), which)
            assert torch.equal(view.read(first, last), TOLD[1:, which, :, first:last])
    for length in (1, 8, 9, 40):
        keys, values = cache.span(2, length)
        assert torch.equal(keys, TOLD[2, 0, :, :length])
        assert torch.equal(values, TOLD[2, 1, :, :length])


@pytest.mark.parametrize("page_rows", [None, 4, 12])
@pytest.mark.parametrize("step", [1, 5, 12])
def test_a_rings_positions_wrap_around(page_rows: int | None, step: int) -> None:
    """The last 12 positions are there, wherever the ring has wrapped; slots hold what maps to them."""
    for length in (5, 12, 13, 24, 29, 40):
        cache = filled(AttentionCache(LAYERS, HEADS, TOTAL, DIM, TOLD, page_rows, ring=12), length, step)
        first = max(0, length - 12)
        assert torch.equal(cache.read(slice(None), 1, first, length), TOLD[:, 1, :, first:length])
        keys, _ = cache.span(1, min(length, 12))
        for position in range(first, length):
            assert torch.equal(keys[:, position % 12], TOLD[1, 0, :, position])


def test_pages_come_as_they_are_needed() -> None:
    """On a GPU a session takes what it uses; on the CPU, where untouched memory is free, all at once."""
    like = torch.empty(0, dtype=torch.bfloat16)
    paged, whole = AttentionCache(1, 1, 100, 2, like, 8), AttentionCache(1, 1, 100, 2, like)
    ring = AttentionCache(1, 1, 100, 2, like, 8, ring=16)
    pages = []
    for length in (0, 1, 8, 9, 60, 100):
        for cache in (paged, ring):
            cache.reserve(length)
        pages.append((len(paged.pages), len(ring.pages)))

    assert pages == [(0, 0), (1, 1), (1, 1), (2, 2), (8, 2), (13, 2)]
    assert len(whole.pages) == 1


def test_a_context_beyond_the_hosts_memory() -> None:
    """A session may be told that it can grow so long: only what it writes takes memory, and counts as its own."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    positions = host // 1024
    cache = AttentionCache(2, 4, positions, 64, torch.empty(0, dtype=torch.bfloat16))
    assert cache.pages[0].nbytes > 1.9 * host
    assert cache.size_bytes == 0
    rows = torch.randn(10, 4, 64).bfloat16()
    for layer in range(2):
        cache.store(layer, 0, rows, -rows)

    keys, values = cache.span(1, 10)
    assert torch.equal(keys, rows.transpose(0, 1))
    assert torch.equal(values, -rows.transpose(0, 1))
    assert cache.size_bytes == 2 * 2 * rows.nbytes


def test_what_is_put_back_touches_nothing_else() -> None:
    """Writing rows of some layers leaves the others, and the other of keys and values, as they were."""
    cache = filled(AttentionCache(LAYERS, HEADS, TOTAL, DIM, TOLD, 8), TOTAL, 40)

    AttentionView(cache, slice(1, 2), 1).write(torch.full((1, HEADS, 11, DIM), -1.0), 5, 16)

    expected = TOLD.clone()
    expected[1, 1, :, 5:16] = -1.0
    for which in (0, 1):
        assert torch.equal(cache.read(slice(None), which, 0, TOTAL), expected[:, which])
