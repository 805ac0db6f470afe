"""Where a step's rows stand and where its session's memory lies, as numbers on the device.

A captured launch reads them there, so that one graph serves all sessions. Filled on the host, sent in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from shard_worker.attention_cache import AttentionCache
from shard_worker.caches import RecurrentCache

BASE, ROWS = tl.constexpr(0), tl.constexpr(1)
"""The first row's position; how many rows there are in truth."""

STATE, INPUTS, KEYS, CORRECTED, DECAYS, ROOM = (tl.constexpr(index) for index in range(3, 9))
"""Of recurrent layers: addresses of the states, the convolution's inputs, and the records of rows that may be rolled
back; how many of those there is room for."""

FIRST_TOKEN, MAX_ROWS = 16, 64
"""From here on the rows' tokens."""

FIRST_PAGE = tl.constexpr(FIRST_TOKEN + MAX_ROWS)
"""From here on the addresses of the session's pages."""


class Place:
    """int64 [FIRST_PAGE + pages] on a device, `tensor`, and its page-locked twin on the host."""

    def __init__(self, device: torch.device, pages: int) -> None:
        self.tensor = torch.zeros(FIRST_PAGE.value + pages, dtype=torch.int64, device=device)
        self._host = torch.zeros(self.tensor.shape, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._numbers = self._host.numpy()

    def fill(
        self,
        base: int,
        token_ids: Sequence[int],
        rows: int,
        attention: AttentionCache | None,
        recurrent: RecurrentCache | None,
    ) -> None:
        """Everything about a step. token_ids: of the rows, or none where activations come."""
        numbers = self._numbers
        numbers[:2] = base, rows
        numbers[FIRST_TOKEN : FIRST_TOKEN + len(token_ids)] = token_ids
        if recurrent is not None:
            numbers[STATE.value : ROOM.value + 1] = recurrent.addresses
        if attention is not None:
            numbers[FIRST_PAGE.value : FIRST_PAGE.value + len(attention.pages)] = attention.addresses

    def send(self) -> None:
        """Queue the copy to the device; in a captured graph this is its first node."""
        self.tensor.copy_(self._host, non_blocking=True)
