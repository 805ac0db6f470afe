"""A session's attention keys and values on one device, in pages: one for the whole session, or more as it grows.

It knows where a position lies, and nothing of what attends to it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shard_worker.ops.float8 import FLOAT8, narrowed, widened

PAGE_ROWS = 256
"""Positions of a page on a GPU."""

_MAP_NORESERVE = 0x4000
"""Linux's flag for memory that is not set aside; Python's mmap lacks it before 3.13."""


class AttentionCache:
    """Keys (after norm and RoPE) and values of all attention layers of a segment.

    They lie in pages of [layers, 2, kv_heads, page rows, head_dim], keys before values. On the CPU there is one page
    for the whole session, whose untouched rows cost nothing, be they more than the host has memory for; on a GPU pages
    are added as the session grows. Positions of a ring wrap around after as many slots as it has. What is kept in 8-bit
    floats is rounded on its way in, so that whatever attends to it sees what will be seen later.

    slots: how many positions there is room for at most. page_rows: positions of a page. dtype: what keys and values are
    kept in. pages: those allocated so far. addresses: of the pages, for kernels.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        like: torch.Tensor,
        page_rows: int | None = None,
        ring: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the only page, or none yet.

        capacity: positions of the longest session. like: a tensor on the device, of the type that is computed in.
        page_rows: None for one page. ring: slots that positions wrap around, None for as many as positions. dtype:
        float8_e4m3fn, or None for the type that is computed in.
        """
        self.slots = capacity if ring is None else ring
        self.page_rows, self._ring, self._like = page_rows or self.slots, ring, like
        self.dtype = dtype or like.dtype
        self._shape = (layers, 2, kv_heads, self.page_rows, head_dim)
        self.pages: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self._is_paged, self._written = page_rows is not None, 0
        if not self._is_paged:
            self._add(_unreserved(self._shape, self.dtype) if like.device.type == "cpu" else self._new_page())

    @property
    def size_bytes(self) -> int:
        """Memory that the pages take so far."""
        size = sum(page.nbytes for page in self.pages)
        return size if self._is_paged else size // self.slots * self._written

    def has_room(self, length: int) -> bool:
        """Say whether there are pages for the first `length` positions."""
        return len(self.pages) * self.page_rows >= min(length, self.slots)

    def reserve(self, length: int) -> None:
        """Allocate what is missing for the first `length` positions, which are going to be written."""
        self._written = max(self._written, min(length, self.slots))
        while not self.has_room(length):
            self._add(self._new_page())

    def _new_page(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self.dtype, device=self._like.device)

    def _add(self, page: torch.Tensor) -> None:
        self.pages.append(page)
        self.addresses.append(page.data_ptr())

    def write(self, layers: slice, which: int, first: int, rows: torch.Tensor) -> None:
        """Put back what `read` gave: keys (which: 0) or values (1), [layers, kv_heads, n, head_dim].

        They are those of n positions from `first` on, no more than there are slots.
        """
        count = rows.shape[2]
        self.reserve(first + count)
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
        self.reserve(first + count)
        for page, start, done, size in self._pieces(first, count):
            page[layer, 0, :, start : start + size] = keys[done : done + size].transpose(0, 1)
            page[layer, 1, :, start : start + size] = values[done : done + size].transpose(0, 1)

    def span(self, layer: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in one layer's first slots to compute with, [kv_heads, slots, head_dim] each."""
        if len(self.pages) == 1:
            both = self.pages[0][layer]
        else:
            both = torch.cat([page[layer] for page in self.pages[: -(-slots // self.page_rows)]], 2)
        keys, values = both[:, :, :slots] if self.dtype is not FLOAT8 else widened(both[:, :, :slots], self._like.dtype)
        return keys, values

    def _pieces(self, first: int, count: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Runs of positions that lie side by side: their page, their first row in it, how many of the `count` positions
        came before, and how many they are."""
        done = 0
        while done < count:
            slot = first + done if self._ring is None else (first + done) % self._ring
            start = slot % self.page_rows
            size = min(count - done, self.page_rows - start, self.slots - slot)
            yield self.pages[slot // self.page_rows], start, done, size
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


def _unreserved(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory of the host whose untouched pages are not even set aside.

    A session may be as long as the model's context, for which the host need not have room: few grow so long.
    `torch.empty` of more than the host's memory is refused. Raises OutOfMemoryError where this is refused as well.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise torch.OutOfMemoryError(f"no {size} bytes of address space for keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
