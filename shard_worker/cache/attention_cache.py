"""A session's attention keys and values on one device, in pages: one for the whole session, or more as it grows.

It knows where a position lies, and nothing of what attends to it but how far that looks back: what lies behind the
window of sliding layers gives its memory back while the session goes on. Pages that kept prefixes and other sessions
hold too are never written where these read; what comes behind a shared prefix goes to pages of the session's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from services.model.cached_tensors import CUT_ROWS, PAGE_ROWS
from shard_worker.cache.kept_pages import KeptPages, memory_of, pages_of
from shard_worker.cache.page_pool import Page, PagePool
from shard_worker.ops.float8 import FLOAT8, narrowed, widened


class AttentionCache:
    """Keys (after norm and RoPE) and values of all attention layers of a segment.

    They lie in pages of [layers, 2, kv_heads, page rows, head_dim], keys before values. On the CPU there is one page
    for the whole session, whose untouched rows cost nothing, be they more than the host has memory for; on a GPU pages
    are added as the session grows. What is kept in 8-bit floats is rounded on its way in, so that whatever attends to
    it sees what will be seen later.

    kv_heads, head_dim: of the keys. capacity: how many positions there may be. window: how many positions a row sees,
    its own included; None for all. page_rows: positions of a page. dtype: what keys and values are kept in. addresses:
    of the pages that there are so far, for kernels; 0 for one that was given back.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        like: torch.Tensor,
        page_rows: int | None = None,
        window: int | None = None,
        dtype: torch.dtype | None = None,
        pool: PagePool | None = None,
    ) -> None:
        """Take the only page, or none yet.

        capacity: positions of the longest session. like: a tensor on the device, of the type that is computed in.
        page_rows: None for one page. dtype: float8_e4m3fn, or None for the type that is computed in. pool: where pages
        come from; None for one without a bound.
        """
        self.capacity, self.window = capacity, window
        self.page_rows, self._like = page_rows or capacity, like
        self.dtype, self._pool = dtype or like.dtype, pool or PagePool()
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self._shape = (layers, 2, kv_heads, self.page_rows, head_dim)
        self._pages: list[Page | None] = []
        self.addresses: list[int] = []
        self.first = 0
        """The first position that has memory: those before it are seen by no row any more."""
        self._is_paged, self._written, self._room = page_rows is not None, 0, 0
        self._is_lazy = not self._is_paged and like.device.type == "cpu"
        self._own_from = 0
        """From this position on all pages may be written by this cache."""
        if not self._is_paged:
            self._add(self._pool.lazy_page(self._shape, self.dtype) if self._is_lazy else self._new_page())

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._like.device

    @property
    def pages(self) -> list[torch.Tensor]:
        """The memory of the pages that there are."""
        return [page.tensor for page in self._pages if page is not None]

    @property
    def size_bytes(self) -> int:
        """Memory that the pages take so far."""
        size = sum(page.nbytes for page in self.pages)
        return size if self._is_paged else size // self.capacity * max(0, self._written - self.first)

    def has_room(self, length: int) -> bool:
        """Say whether there is memory for the positions up to `length`."""
        return self._room >= min(length, self.capacity)

    def reserve(self, length: int) -> None:
        """Take what is missing for the positions up to `length`, which are going to be written.

        Raises ResourceExhausted where the pool has no room for that.
        """
        # Each step of each session asks, and hardly ever is anything missing.
        if length > self.capacity:
            length = self.capacity
        if length > self._written:
            self._written = length
        while self._room < length:
            if self._is_lazy:
                self._touch()
            else:
                self._add(self._new_page())

    def _new_page(self) -> Page:
        return self._pool.page(self._shape, self.dtype, self._like.device)

    def _add(self, page: Page, *, own: bool = True) -> None:
        if own:
            page.writer = weakref.ref(self)
        self._pages.append(page)
        self.addresses.append(page.address)
        if not self._is_lazy:
            self._room += self.page_rows

    def _touch(self) -> None:
        """Count the next rows of the only page as written."""
        rows = min(PAGE_ROWS, self.capacity - self._room)
        self._pool.touch(self._page(0), self._page(0).tensor.nbytes // self.capacity * rows)
        self._room += rows

    def _page(self, index: int) -> Page:
        page = self._pages[index]
        assert page is not None
        return page

    # --- what no row sees any more

    @property
    def shortest(self) -> int:
        """The fewest positions that a session can be cut to whose next rows see all that they should."""
        return 0 if self.window is None or not self.first else self.first + self.window - 1

    def free_unseen(self, length: int) -> None:
        """Free the memory of positions that no row sees from CUT_ROWS before position `length` on."""
        if self.window is not None:
            rows = self.page_rows if self._is_paged else PAGE_ROWS
            self.begin_at((length - CUT_ROWS + 1 - self.window) // rows * rows)

    def begin_at(self, position: int) -> None:
        """Have memory from this position on only: no row that comes sees what is before."""
        if position <= self.first:
            return
        if self._is_paged:
            count = position // self.page_rows
            held = min(count, len(self._pages))
            for index in range(self.first // self.page_rows, held):
                self._pages[index], self.addresses[index] = None, 0
            self._pages += [None] * (count - held)
            self.addresses += [0] * (count - held)
            self._room = max(self._room, count * self.page_rows)
        elif self._is_lazy:
            page, row_bytes = self._page(0), self._page(0).tensor.nbytes // self.capacity
            self._pool.untouch(page, row_bytes * max(0, min(position, self._room) - self.first), position)
            self._room = max(self._room, position)
        self.first = position

    # --- pages that others hold too

    @property
    def shares(self) -> bool:
        """Whether kept prefixes can hold its pages. The one page of a CPU's session grows with the session's own
        positions only: of these, prefixes are copied."""
        return self._is_paged

    def keep(self, first: int, last: int) -> KeptPages:
        """Share the pages of positions [first, last) with a kept prefix. They are written no more."""
        pages = [self._page(index) for index, _, _ in pages_of(first, last, self.page_rows)]
        self._own_from = max(self._own_from, last)
        kept = KeptPages(first, last, self.page_rows, pages)
        self._pool.keeps(kept)
        return kept

    def take_up(self, chain: Sequence[KeptPages], length: int) -> list[tuple[int, int]]:
        """Begin an empty cache with the first `length` positions of a prefix, as far as they are in kept pages and not
        before where the cache begins.

        chain: of parts of the prefix that follow each other, those that are in pages. Full pages are shared; the last
        one of a part is copied, unless nobody else writes behind it. What was moved to the host is copied too, full
        pages into such as are shared again. Returns the positions that are there now. Errors as in `reserve`.
        """
        sources: dict[int, tuple[KeptPages, int]] = {}
        for kept in chain:
            last = min(kept.last, length)
            # A later part has the page where it begins too, with what the parts before have in it.
            for index, start, rows in pages_of(kept.first, last, self.page_rows):
                sources[index] = kept, start + rows
            self._pool.keeps(kept)
        there = []
        for index in range(len(self._pages), max(sources, default=-1) + 1):
            if index not in sources:
                self._add(_clear(self._new_page()))
                continue
            kept, rows = sources[index]
            page = kept.page(index)
            if isinstance(page, Page) and (rows == self.page_rows or _can_go_on(page, rows)):
                self._add(page, own=rows < self.page_rows)
            else:
                self._add(self._copied(page, rows))
                if rows == self.page_rows:
                    kept.move_back(index, self._page(index))
            there.append((index * self.page_rows, index * self.page_rows + rows))
        self._own_from = self._written = there[-1][1] if there else 0
        return there

    def _copied(self, page: Page | torch.Tensor, rows: int) -> Page:
        """Return a page of the cache's own with the first rows of another one."""
        copy, memory = self._new_page(), memory_of(page)
        if rows == self.page_rows:
            copy.tensor.copy_(memory, non_blocking=True)
        else:
            copy.tensor[:, :, :, :rows].copy_(memory[:, :, :, :rows], non_blocking=True)
        return copy

    def prepare_rows(self, first: int, count: int) -> None:
        """Take what is missing to write `count` positions from `first` on, and copy pages that others read there.
        Errors as in `reserve`."""
        self.reserve(first + count)
        if first >= self._own_from:
            return
        for index, start, _ in pages_of(first, first + count, self.page_rows):
            page = self._page(index)
            if start < page.kept_rows:
                own = self._copied(page, self.page_rows)
                own.writer = weakref.ref(self)
                self._pages[index], self.addresses[index] = own, own.address

    # --- reading and writing

    def write(self, layers: slice, which: int, first: int, rows: torch.Tensor) -> None:
        """Put back what `read` gave: keys (which: 0) or values (1), [layers, kv_heads, n, head_dim].

        They are those of n positions from `first` on. Positions before them need not have been written, where nothing
        looks back so far.
        """
        count, before = rows.shape[2], len(self._pages)
        self.prepare_rows(first, count)
        for index in range(before, len(self._pages)):
            _clear(self._page(index))
        for page, start, done, size in self._pieces(first, count):
            page[layers, which, :, start : start + size].copy_(rows[:, :, done : done + size], non_blocking=True)

    def read(self, layers: slice, which: int, first: int, last: int) -> torch.Tensor:
        """Return keys (which: 0) or values (1) of positions [first, last) as they are kept.

        The result is [layers, kv_heads, last - first, head_dim], a view where the positions lie side by side.
        """
        pieces = self._pieces(first, last - first)
        parts = [page[layers, which, :, start : start + size] for page, start, _, size in pieces]
        if not parts:
            all_layers, _, heads, _, dim = self._shape
            return self._like.new_empty((len(range(all_layers)[layers]), heads, 0, dim), dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def store(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows [n, kv_heads, head_dim] of one layer from position `first` on."""
        if self.dtype is FLOAT8:
            keys, values = narrowed(keys), narrowed(values)
        count = len(keys)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        for places, own in self.places(layer, first, count):
            for held, given in zip(places, (keys, values), strict=True):
                held.copy_(given if held.shape[1] == count else given[:, own])

    def places(self, layer: int, first: int, count: int) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], slice]]:
        """Yield where the keys and the values of `count` rows of one layer are kept from position `first` on,
        [kv_heads, n, head_dim] both, with which of the rows these n are: runs of positions that lie side by side."""
        self.prepare_rows(first, count)
        for page, start, done, size in self._pieces(first, count):
            keys, values = page[layer].narrow(2, start, size).unbind()
            yield (keys, values), slice(done, done + size)

    def span(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values at positions [first, last) to compute with, [kv_heads, n, head_dim]."""
        begin, end = first // self.page_rows, -(-last // self.page_rows)
        pages = [self._page(index).tensor[layer] for index in range(begin, end)]
        both = pages[0] if len(pages) == 1 else torch.cat(pages, 2)
        both = both[:, :, first - begin * self.page_rows : last - begin * self.page_rows]
        keys, values = (both if self.dtype is not FLOAT8 else widened(both, self._like.dtype)).unbind()
        return keys, values

    def _pieces(self, first: int, count: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Runs of positions that lie side by side: their page, their first row in it, how many of the `count` positions
        came before, and how many they are."""
        done = 0
        for index, start, size in pages_of(first, first + count, self.page_rows):
            yield self._page(index).tensor, start, done, size
            done += size


@dataclass(frozen=True, slots=True)
class AttentionView:
    """A `StateView` of the keys (which: 0) or values (1) of some layers: [layers, kv_heads, n, head_dim]."""

    cache: AttentionCache
    layers: slice
    which: int

    def read(self, first: int, last: int) -> torch.Tensor:
        return self.cache.read(self.layers, self.which, first, last)

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        self.cache.write(self.layers, self.which, first, tensor)


def _clear(page: Page) -> Page:
    """Fill a page with zeros. What nothing looks at has no weight, but must be numbers: 0 times infinity is none."""
    page.tensor.zero_()
    return page


def _can_go_on(page: Page, rows: int) -> bool:
    """Whether a session may write behind the first rows of a kept page: no other one does, and none has been kept."""
    return page.writer() is None and page.kept_rows == rows
