"""Where a step's rows stand and where its session's memory lies, as numbers on the device.

A captured launch reads them there, so that one graph serves all sessions. Filled on the host, sent in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.device.dtypes import bytes_of

BASE, ROWS = tl.constexpr(0), tl.constexpr(1)
"""The first row's position; how many rows there are in truth."""

STATE, INPUTS, KEYS, CORRECTED, DECAYS, ROOM = (tl.constexpr(index) for index in range(3, 9))
"""Of recurrent layers: addresses of the states, the convolution's inputs, and the records of rows that may be rolled
back; how many of those there is room for."""

FIRST_TOKEN, MAX_ROWS = tl.constexpr(16), 64
"""From here on the rows' tokens."""

FIRST_PAGE = tl.constexpr(16 + MAX_ROWS)
"""From here on the addresses of the session's pages."""


class Place:
    """int64 [copies, FIRST_PAGE + pages] on a device, `tensor`, and its page-locked twin on the host.

    Several copies are of one step for layers with caches of their own.
    """

    def __init__(self, device: torch.device, pages: int, copies: int = 1) -> None:
        shape = (copies, FIRST_PAGE.value + pages)
        self.tensor = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._numbers = self._host.numpy()
        # A store is all that lies between a number and a device that waits for it.
        self._words = bytes_of(self._host).cast("q")
        self.done = torch.cuda.Event() if device.type != "cpu" else None
        """Recorded behind the last launch."""

    def fill(
        self,
        base: int,
        rows: int,
        *,
        copy: int = 0,
        token_ids: Sequence[int] = (),
        attention: AttentionCache | None = None,
        recurrent: RecurrentCache | None = None,
    ) -> None:
        """Everything about a step. token_ids: of the rows, or none where activations come."""
        # What was sent last must have left before it is overwritten.
        self.wait()
        self.move(base, rows, copy=copy, token_ids=token_ids)
        numbers = self._numbers[copy]
        if recurrent is not None:
            numbers[STATE.value : ROOM.value + 1] = recurrent.addresses
        if attention is not None:
            first = FIRST_PAGE.value
            numbers[first : first + len(attention.addresses)] = attention.addresses

    def move(self, base: int, rows: int, *, copy: int = 0, token_ids: Sequence[int] = ()) -> None:
        """Where a step stands, for the session that was filled in, behind `wait`. Arguments as of `fill`."""
        words, at = self._words, copy * self._host.shape[1]
        words[at], words[at + 1] = base, rows
        for word, token in enumerate(token_ids, at + FIRST_TOKEN.value):
            words[word] = token

    def send(self) -> None:
        """Queue the copy to the device; in a captured graph this is its first node."""
        self.tensor.copy_(self._host, non_blocking=True)

    def sent(self) -> None:
        """To be called behind every launch that sends."""
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        """Until the last launch is done."""
        if self.done is not None:
            self.done.synchronize()
