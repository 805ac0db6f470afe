"""The memory of one device for attention keys and values: sessions and kept prefixes take pages of it and share them.

Whoever holds a page has a reference to it, and the last to let go of it gives it back; the references are those that
Python counts, so that a session which ends halfway leaves none behind. Pages are taken on the device's thread, and
given back on any.

Layers of other shapes have pages of other sizes: one for each segment of a stage, one or two for a draft. They are cut
from one piece of memory, the largest from its front and all others from its back, so that small ones seldom stand
between large ones. A share of its own for each would be simpler, but what one cannot use the other would lack.

On a CPU a session has one page for all its positions, whose untouched rows take no memory: plain torch attends to keys
that lie side by side, and putting pages together at every step would cost more than a step has to spare. What the pool
counts there is the rows that have been written.
"""

from __future__ import annotations

import bisect
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from services.errors import OUT_OF_MEMORY, ResourceExhausted
from shard_worker.device.devices import Device, free_bytes

if TYPE_CHECKING:
    from shard_worker.cache.kept_pages import KeptPages

_ALIGNMENT = 1024
"""Pages begin at multiples of so many bytes."""

_MAP_NORESERVE = 0x4000
"""Linux's flag for memory that is not set aside; Python's mmap lacks it before 3.13."""


class Page:
    """Keys and values of consecutive positions, [layers, 2, kv_heads, rows, head_dim], keys before values.

    tensor: the memory. address: its first byte's, for kernels. kept_rows: how many of the first rows kept prefixes
    count on; they are not written any more, as long as the page lives. writer: returns the cache that writes the rows
    behind those, None where it is gone.
    """

    __slots__ = (
        "_give_back",
        "_on_host",
        "_place",
        "address",
        "kept_rows",
        "mapping",
        "size_bytes",
        "tensor",
        "writer",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        size_bytes: int,
        place: int | None,
        give_back: Callable[[int | None, int], None],
        mapping: mmap.mmap | None = None,
    ) -> None:
        """size_bytes: what the pool counts of it so far. place: where it was cut from the pool's memory, None where it
        was not. give_back: called with `place` and `size_bytes` when nobody holds the page any more. mapping: the
        host's memory that it is made of, where untouched rows take none."""
        self.tensor, self.address, self.size_bytes = tensor, tensor.data_ptr(), size_bytes
        self.mapping = mapping
        self.kept_rows = 0
        self.writer: Callable[[], object | None] = lambda: None
        self._place, self._give_back = place, give_back
        self._on_host: tuple[Callable[[], torch.Tensor | None], int] = (lambda: None), 0

    def __del__(self) -> None:
        self._give_back(self._place, self.size_bytes)

    def on_host(self) -> torch.Tensor:
        """Return a copy of the kept rows in host memory, of the page's shape; the same copy as long as it lives."""
        made, rows = self._on_host
        copy = made()
        if copy is None or rows < self.kept_rows:
            copy = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda)
            copy.copy_(self.tensor)
            self._on_host = weakref.ref(copy), self.kept_rows
        return copy


class PagePool:
    """The pages of one device, and how much they may take together.

    size_bytes: the most that pages may take; None for no bound, where each page is asked of the device by itself.
    spare: asked first where pages end, on the device's thread: gives up pages that nobody may ask for any more, and
    returns whether there were any.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.spare: Callable[[], bool] = lambda: False
        self._memory: _Memory | None = None
        self._used = 0
        # Filled by whoever lets go of a page, even within the lock.
        self._returned: deque[tuple[int | None, int]] = deque()
        self._lock = threading.Lock()
        # From the least to the most recently used.
        self._kept: weakref.WeakValueDictionary[int, KeptPages] = weakref.WeakValueDictionary()

    @property
    def used_bytes(self) -> int:
        """What pages take that somebody holds; on any thread."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def unused_bytes(self) -> int:
        """Memory of the device that was taken and that no page has; on any thread."""
        return 0 if self._memory is None else len(self._memory.tensor) - self.used_bytes

    def take(self, size_bytes: int, device: torch.device | None) -> None:
        """Bound what pages may take together, unless memory is taken already.

        device: where so much memory is taken at once, of which pages are cut from now on; None where untouched rows
        take none.
        """
        if self._memory is not None:
            return
        self.size_bytes = size_bytes
        if device is not None:
            self._memory = _Memory(torch.empty(size_bytes, dtype=torch.uint8, device=device))

    def take_share(self, share: float, device: Device) -> None:
        """Take what is free on a device but for what its share does not cover; what is used already counts in it.

        On a CPU the pool may use that share of the memory that is free, and takes it as rows are written.
        """
        free, total = free_bytes(device)
        if device.is_gpu:
            self.take(max(0, free - int((1 - share) * total)) // _ALIGNMENT * _ALIGNMENT, device.torch_device)
        else:
            self.take(int(share * free), None)

    def leave(self) -> None:
        """Give all memory back to the device, unless sessions use it; kept prefixes go to the host's memory first."""
        while self._evict():
            pass
        if not self.used_bytes:
            was_taken = self._memory is not None
            self._memory, self.size_bytes = None, None
            if was_taken:
                # Or what is loaded next would be cut from it by torch, and all of it would stay taken.
                torch.cuda.empty_cache()

    # --- pages

    def page(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Page:
        """Return a new page, whose content is undefined. Raises ResourceExhausted where there is no room for one, even
        without any kept prefix."""
        while (page := self._new(shape, dtype, device)) is None:
            if not self._evict():
                raise self._exhausted(math.prod(shape) * dtype.itemsize)
        return page

    def lazy_page(self, shape: tuple[int, ...], dtype: torch.dtype) -> Page:
        """Return a page of the host whose untouched rows take no memory; `touch` comes before they are written."""
        tensor, mapping = _unreserved(shape, dtype)
        return self._made(tensor, 0, None, mapping)

    def touch(self, page: Page, size_bytes: int) -> None:
        """Count that many more bytes of a lazy page as used. Errors as in `page`."""
        while not self._count(size_bytes):
            if not self._evict():
                raise self._exhausted(size_bytes)
        page.size_bytes += size_bytes

    def untouch(self, page: Page, size_bytes: int, rows: int) -> None:
        """Give the memory of a lazy page's first rows back to the host. They are zeros then.

        size_bytes: how much of it was counted by now.
        """
        assert page.mapping is not None
        page.size_bytes -= size_bytes
        self._returned.append((None, size_bytes))
        *others, capacity, dim = page.tensor.shape
        row_bytes = dim * page.tensor.itemsize
        for head in range(math.prod(others)):
            # The system's pages at both ends have rows that stay.
            begin = -(-head * capacity * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (head * capacity + rows) * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                page.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Page | None:
        """Return a new page, None where there is no room for one."""
        size = math.prod(shape) * dtype.itemsize
        taken = size + -size % _ALIGNMENT
        if not self._count(taken):
            return None
        if self._memory is None:
            return self._made(torch.empty(shape, dtype=dtype, device=device), taken, None)
        with self._lock:
            place = self._memory.cut(taken)
            if place is None:
                # Enough is free, but not in one piece.
                self._used -= taken
                return None
        return self._made(self._memory.tensor[place : place + size].view(dtype).view(shape), taken, place)

    def _made(self, tensor: torch.Tensor, size_bytes: int, place: int | None, mapping: mmap.mmap | None = None) -> Page:
        returned = self._returned
        return Page(tensor, size_bytes, place, lambda place, size: returned.append((place, size)), mapping)

    def _count(self, size_bytes: int) -> bool:
        """Count bytes as used, where there is room for them."""
        with self._lock:
            self._collect()
            if self.size_bytes is not None and self._used + size_bytes > self.size_bytes:
                return False
            self._used += size_bytes
            return True

    def _collect(self) -> None:
        """Take back what was let go of; within the lock."""
        while self._returned:
            place, size = self._returned.popleft()
            self._used -= size
            if place is not None and self._memory is not None:
                self._memory.put_back(place, size)

    def _exhausted(self, size_bytes: int) -> ResourceExhausted:
        used, size = self.used_bytes, self.size_bytes or 0
        return ResourceExhausted(
            f"no memory is left for keys and values: {size_bytes} bytes are needed, and {used} of {size} are in use; "
            "serve fewer or shorter sessions at once, give this stage fewer layers, or raise --gpu-memory-utilization",
            reason=OUT_OF_MEMORY,
        )

    # --- kept prefixes

    def keeps(self, kept: KeptPages) -> None:
        """Note that a kept prefix holds pages, or was used: when pages end, those used the longest ago give theirs."""
        self._kept.pop(id(kept), None)
        self._kept[id(kept)] = kept

    def _evict(self) -> bool:
        """Let what rests give up its pages, or else one kept prefix move to the host's memory; False where nothing has
        any."""
        if self.spare():
            return True
        kept = next(self._kept.values(), None)
        if kept is None:
            return False
        self._kept.pop(id(kept), None)
        kept.move_to_host()
        return True


class _Memory:
    """One piece of a device's memory, of which pages of several sizes are cut. tensor: uint8 [bytes]."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._free = [(0, len(tensor))]
        """Where memory is free, and how many bytes: by place, and never two side by side."""
        self._largest = 0

    def cut(self, size_bytes: int) -> int | None:
        """Return where a page of this size begins now; None without so much in one piece."""
        self._largest = max(self._largest, size_bytes)
        from_front = size_bytes == self._largest
        indices = range(len(self._free))
        for index in indices if from_front else reversed(indices):
            place, free = self._free[index]
            if free >= size_bytes:
                left = free - size_bytes
                begin, rest = (place, place + size_bytes) if from_front else (place + left, place)
                self._free[index : index + 1] = [(rest, left)] if left else []
                return begin
        return None

    def put_back(self, place: int, size_bytes: int) -> None:
        """Let the memory of a page be cut again."""
        index = bisect.bisect(self._free, (place, 0))
        if index < len(self._free) and self._free[index][0] == place + size_bytes:
            size_bytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == place:
            index -= 1
            place, before = self._free.pop(index)
            size_bytes += before
        self._free.insert(index, (place, size_bytes))


def _unreserved(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    """Return memory of the host whose untouched pages are not even set aside, and the mapping that it is.

    A session may be as long as the model's context, for which the host need not have room: few grow so long.
    `torch.empty` of more than the host's memory is refused. Raises OutOfMemoryError where this is refused as well.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise torch.OutOfMemoryError(f"no {size} bytes of address space for keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape), memory
