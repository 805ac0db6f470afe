"""The numbers of a step that kernels read on the device: where its rows stand and where its session's memory lies.

A captured launch reads them there, so that one graph serves all sessions. They are filled in on the host and sent in
one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.device.dtypes import bytes_of

BASE, ROWS = tl.constexpr(0), tl.constexpr(1)
"""Indices of the first row's position, and of the number of rows that the step really has."""

STATE, INPUTS, KEYS, CORRECTED, DECAYS, ROOM = (tl.constexpr(index) for index in range(3, 9))
"""Indices of what recurrent layers need: the addresses of the states, of the convolution's inputs and of the records of
rows that may be rolled back, and for how many such rows there is room."""

FIRST_TOKEN, MAX_ROWS = tl.constexpr(16), 512
"""The index of the first row's token; the others follow. The most rows that a step can have."""

FIRST_PAGE = tl.constexpr(16 + MAX_ROWS)
"""The index of the address of the session's first page; the others follow."""


class StepParameters:
    """The parameters of a step: `tensor`, int64 [copies, FIRST_PAGE + pages] on a device, and its page-locked twin on
    the host.

    Several copies describe one step for layers with caches of their own.
    """

    def __init__(self, device: torch.device, pages: int, copies: int = 1) -> None:
        shape = (copies, FIRST_PAGE.value + pages)
        self.tensor = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._numbers = self._host.numpy()
        # A store is all that lies between a number and a device that waits for it.
        self._words = bytes_of(self._host).cast("q")
        self.done = torch.cuda.Event() if device.type != "cpu" else None
        """Recorded behind the last launch that read them; None on a CPU."""

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
        """Wait for the last launch, then set everything about a step: its rows, as `set_rows` does, and its caches."""
        # What was sent last must have left before it is overwritten.
        self.wait()
        self.set_rows(base, rows, copy=copy, token_ids=token_ids)
        numbers = self._numbers[copy]
        if recurrent is not None:
            numbers[STATE.value : ROOM.value + 1] = recurrent.addresses
        if attention is not None:
            first = FIRST_PAGE.value
            numbers[first : first + len(attention.addresses)] = attention.addresses

    def set_rows(self, base: int, rows: int, *, copy: int = 0, token_ids: Sequence[int] = ()) -> None:
        """Set where the step's rows stand, for the session whose caches were filled in; to be called behind `wait`.

        token_ids: of the rows, or none where activations come.
        """
        words, at = self._words, copy * self._host.shape[1]
        words[at], words[at + 1] = base, rows
        for word, token in enumerate(token_ids, at + FIRST_TOKEN.value):
            words[word] = token

    def send(self) -> None:
        """Queue the copy to the device; in a captured graph this is the first node."""
        self.tensor.copy_(self._host, non_blocking=True)

    def record_launch(self) -> None:
        """Note that a launch was queued that sends them: `wait` waits for it."""
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        """Wait until the last launch is done."""
        if self.done is not None:
            self.done.synchronize()
