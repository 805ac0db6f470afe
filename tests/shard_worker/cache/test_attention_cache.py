"""Keys and values in pages: what is stored at a position is read there, wherever it lies, while any row sees it."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from shard_worker.cache import attention_cache
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.page_pool import PagePool

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
    """By position, in views of several layers, and as a span of one layer."""
    cache = filled(AttentionCache(LAYERS, HEADS, TOTAL, DIM, TOLD, page_rows), TOTAL, step)

    for which in (0, 1):
        for first, last in ((0, 40), (3, 9), (7, 8), (15, 33), (9, 9)):
            view = AttentionView(cache, slice(1, 3), which)
            assert torch.equal(view.read(first, last), TOLD[1:, which, :, first:last])
    for first, last in ((0, 1), (0, 8), (0, 9), (0, 40), (7, 9), (8, 16), (13, 40)):
        keys, values = cache.span(2, first, last)
        assert torch.equal(keys, TOLD[2, 0, :, first:last])
        assert torch.equal(values, TOLD[2, 1, :, first:last])


WINDOW, CUT = 7, 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have memory given back in small pieces, and soon."""
    monkeypatch.setattr(attention_cache, "CUT_ROWS", CUT)
    monkeypatch.setattr(attention_cache, "PAGE_ROWS", 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("page_rows", [None, 1, 4, 12])
@pytest.mark.parametrize("step", [1, 5, 12])
def test_what_is_behind_a_window_gives_its_memory_back(page_rows: int | None, step: int) -> None:
    """All that a row sees is there, also once the session was cut by some rows; the pool has the rest again, and
    kernels find no address of it."""
    pool = PagePool()
    cache = AttentionCache(LAYERS, HEADS, TOTAL, DIM, TOLD, page_rows, WINDOW, pool=pool)
    row_bytes = LAYERS * 2 * HEADS * DIM * 4
    for first in range(0, TOTAL, step):
        length = min(first + step, TOTAL)
        for layer in range(LAYERS):
            cache.store(layer, first, *TOLD[layer, :, :, first:length].transpose(1, 2))
        cache.free_unseen(length)
        seen = max(0, length - CUT + 1 - WINDOW)
        assert cache.first <= seen
        assert cache.shortest <= max(0, length - CUT)
        for layer in range(LAYERS):
            keys, values = cache.span(layer, seen, length)
            assert torch.equal(keys, TOLD[layer, 0, :, seen:length])
            assert torch.equal(values, TOLD[layer, 1, :, seen:length])
        assert torch.equal(cache.read(slice(None), 1, seen, length), TOLD[:, 1, :, seen:length])
        most = WINDOW + CUT + 2 * (page_rows or 5)
        assert cache.size_bytes <= most * row_bytes
        if page_rows is None:
            assert pool.used_bytes <= most * row_bytes
        else:
            page_bytes = page_rows * row_bytes
            assert pool.used_bytes == len(cache.pages) * (page_bytes + -page_bytes % 1024)
            assert [address == 0 for address in cache.addresses] == [
                (index + 1) * page_rows <= cache.first for index in range(len(cache.addresses))
            ]
    assert cache.first > 0
    del cache
    gc.collect()
    assert pool.used_bytes == 0


@pytest.mark.usefixtures("small")
def test_the_host_has_its_memory_again() -> None:
    """Rows behind the window are zeros on a CPU, their memory the system's; those at both ends of a head stay."""
    cache = AttentionCache(1, 2, 16000, 64, torch.empty(0), window=WINDOW)
    rows = torch.ones(1000, 2, 64)
    for first in range(0, 16000, 1000):
        cache.store(0, first, rows, rows)
    [page] = cache.pages
    before = resident_bytes()
    cache.free_unseen(16000)
    given_back = before - resident_bytes()
    assert page[:, :, :, cache.first :].eq(1).all()
    # Of 256 bytes a row, up to 16 rows at either end are on pages of the system that stay.
    assert page[:, :, :, 16 : cache.first - 16].eq(0).all()
    assert given_back > 0.95 * page.nbytes


def resident_bytes() -> int:
    """Memory of this process that is not in any file."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def test_pages_come_as_they_are_needed() -> None:
    """On a GPU a session takes what it uses; on the CPU, where untouched memory is free, all at once."""
    like = torch.empty(0, dtype=torch.bfloat16)
    paged, whole = AttentionCache(1, 1, 100, 2, like, 8), AttentionCache(1, 1, 100, 2, like)
    begun = AttentionCache(1, 1, 100, 2, like, 8, 16)
    begun.begin_at(17)
    pages = []
    for length in (0, 1, 8, 9, 60, 100):
        for cache in (paged, begun):
            cache.reserve(length)
        pages.append((len(paged.pages), len(begun.pages)))

    assert pages == [(0, 0), (1, 0), (1, 0), (2, 0), (8, 6), (13, 11)]
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

    keys, values = cache.span(1, 0, 10)
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
