"""Pages that a kept prefix holds, and shares with the sessions that saved it and that take it up.

It owns references to pages, no session's cache. When the device's pages end it moves to the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shard_worker.cache.page_pool import Page


class KeptPages:
    """Keys and values of positions [first, last) of a prefix, in pages of `page_rows` positions each.

    pages: those from `first_page` on, the last one filled up to `last`; on the device, or copies on the host.
    """

    def __init__(self, first: int, last: int, page_rows: int, pages: list[Page]) -> None:
        """pages: all those that hold any of the positions."""
        self.first, self.last, self.page_rows = first, last, page_rows
        self.first_page = first // page_rows
        self.pages: list[Page | torch.Tensor] = [*pages]
        for index, page in enumerate(pages, self.first_page):
            self._count_on(index, page)

    def page(self, index: int) -> Page | torch.Tensor:
        """Return the page of that number, counted from position 0 on."""
        return self.pages[index - self.first_page]

    def move_to_host(self) -> None:
        """Let go of the device's pages, after having copied them; on the device's thread."""
        self.pages = [page.on_host() if isinstance(page, Page) else page for page in self.pages]

    def move_back(self, index: int, page: Page) -> None:
        """Hold a page of the device again, which has been filled from the copy of that number on the host."""
        self._count_on(index, page)
        self.pages[index - self.first_page] = page

    def _count_on(self, index: int, page: Page) -> None:
        page.kept_rows = max(page.kept_rows, min(self.page_rows, self.last - index * self.page_rows))

    def read(self, layers: slice, which: int, first: int, last: int) -> torch.Tensor:
        """Return keys (which: 0) or values (1) of positions [first, last), as `AttentionCache.read` does."""
        parts = [
            memory_of(self.page(index))[layers, which, :, start : start + size]
            for index, start, size in pages_of(first, last, self.page_rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """A group of tensors within kept pages: keys (which: 0) or values (1) of some layers."""

    kept: KeptPages
    layers: slice
    which: int

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return the rows of positions [first, last): [layers, kv_heads, n, head_dim]."""
        return self.kept.read(self.layers, self.which, first, last)


def memory_of(page: Page | torch.Tensor) -> torch.Tensor:
    """Return a page's memory, on the device or on the host."""
    return page.tensor if isinstance(page, Page) else page


def pages_of(first: int, last: int, page_rows: int) -> Iterator[tuple[int, int, int]]:
    """Return the pages of positions [first, last): the number of each, the first row in it, and how many rows."""
    while first < last:
        index, start = divmod(first, page_rows)
        size = min(last - first, page_rows - start)
        yield index, start, size
        first += size
