"""The numbers of a step that kernels read on the device: where its rows stand and where its sessions' memory lies.

A captured launch reads them there, so that one graph serves all sessions. They are filled in on the host and sent in
one copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.device.dtypes import bytes_of

BASE, ROWS, FIRST_ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Indices in a session's line: of its first row's position, of how many rows it has in the step, and of the first one
among the step's rows, which the others follow."""

STATE, INPUTS, KEYS, CORRECTED, DECAYS, ROOM = (tl.constexpr(index) for index in range(3, 9))
"""Indices of what recurrent layers need: the addresses of the states, of the convolution's inputs and of the records of
rows that may be rolled back, and for how many such rows there is room."""

FIRST_SUM = tl.constexpr(9)
"""The index of where attention may leave the session's partial sums, in rows and chunks: behind those of the sessions
before it."""

BEHIND, ENDED = tl.constexpr(10), tl.constexpr(11)
"""The indices of what `complete_step` needs: one more than the session's number in the step before, whose outcome says
where this one begins, 0 where the host knows that; and of what it finds: 1 where the session ended there."""

COUNTED = tl.constexpr(12)
"""The index of how many of the session's rows count as soon as they are computed, in a step of several sessions: all of
them, or 0 where a commit, or the next step, says later how many do."""

DEFERRED = tl.constexpr(13)
"""The index of which row recurrent layers are still to advance by before the step's own one, which is a single row: one
more than the place of its record (`RecurrentCache.deferred`), 0 where there is none."""

FIRST_PAGE = tl.constexpr(16)
"""The index of the address of the session's first page; the others follow, and behind those the pages of other caches,
which layers with keys of another shape have."""


_FIRST_SUM, _FIRST_PAGE = FIRST_SUM.value, FIRST_PAGE.value
assert [index.value for index in (BASE, ROWS, FIRST_ROW)] == [0, 1, 2]
assert [index.value for index in (FIRST_SUM, BEHIND, ENDED, COUNTED, DEFERRED)] == [*range(_FIRST_SUM, _FIRST_SUM + 5)]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a step stand, for layers that share a cache: int64 tensors on the device.

    lines: [sessions, FIRST_PAGE + pages], the numbers of each session; a session without rows has zeros. sessions,
    indices: [rows], each row's session, -1 where there is no such row, and its place among the session's rows; None
    where all rows are those of the only session, in order. blocks: whether sessions have several rows each, mostly, as
    where drafts are verified.
    """

    lines: torch.Tensor
    sessions: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    blocks: bool = False

    @property
    def line(self) -> int:
        """How far the sessions' numbers are apart; 0 where all rows are those of the only session."""
        return 0 if self.sessions is None else self.lines.stride(0)


@triton.jit
def _take_tokens(tokens, before, rows, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < rows, other=0)
    made = tl.load(before + (-1 - token), mask=(at < rows) & (token < 0), other=0)
    tl.store(tokens + at, made, mask=(at < rows) & (token < 0))


def take_tokens(tokens: torch.Tensor, before: torch.Tensor) -> None:
    """Replace tokens below 0 by those that rows of the step before came to: -1 by that of the first row, and so on.

    tokens: int64 [n]. before: the tokens of all rows of the step before, int64 [rows].
    """
    _take_tokens[(1,)](tokens, before, len(tokens), BLOCK=triton.next_power_of_2(len(tokens)), num_warps=4)


@dataclass(frozen=True, slots=True)
class _Twin:
    """A step's parameters in page-locked memory on the host.

    words: all of them, one by one. placed, lines: numpy's views of where rows stand, and of the sessions' numbers.
    done: recorded behind the last launch that read them; None on a CPU.
    """

    tensor: torch.Tensor
    words: memoryview
    placed: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    lines: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    done: torch.cuda.Event | None


class StepParameters:
    """The parameters of a step on a device, and their page-locked twins on the host.

    tokens: int64 [rows] on the device. lines: int64 [copies, sessions, FIRST_PAGE + pages] there: several copies
    describe one step for layers with caches of their own.
    """

    def __init__(
        self,
        device: torch.device,
        pages: int,
        *,
        rows: int,
        sessions: int | None = None,
        copies: int = 1,
        caches: int = 1,
        twins: int = 1,
    ) -> None:
        """pages: the most that a session has in a cache. rows: the most of a step. sessions: the most whose rows stand
        in a step; None for steps of one session alone. caches: how many with pages a session has. twins: how many steps
        of several sessions may be launched or begun at a time."""
        self._pages = pages
        length = FIRST_PAGE.value + caches * pages
        placed = 0 if sessions is None else 2 * rows
        shape = (copies, sessions or 1, length)
        size = rows + placed + shape[0] * shape[1] * length
        self._tensor = torch.zeros(size, dtype=torch.int64, device=device)
        self.tokens, self._places, lines = self._tensor.split((rows, placed, size - rows - placed))
        self.lines = lines.view(shape)
        self._at, self._rows, self._line, self._copy_stride = rows + placed, rows, length, shape[1] * length
        self._sessions = shape[1]
        self._numbers = memoryview(array("q", range(rows)))
        self._twins = [self._make_twin(size, rows, placed, shape) for _ in range(twins)]
        self.turn = 0
        """Which of the twins the last step has."""
        self._begun = [0] * twins
        """How often each of them was begun."""
        self._next = 0
        """Which of them the last step got that was begun."""
        self._words = self._twins[0].words

    def _make_twin(self, size: int, rows: int, placed: int, shape: tuple[int, ...]) -> _Twin:
        on_gpu = self._tensor.device.type != "cpu"
        host = torch.zeros(size, dtype=torch.int64, pin_memory=on_gpu)
        _, places, lines = host.split((rows, placed, size - rows - placed))
        # A store is all that lies between a number and a device that waits for it.
        words = bytes_of(host).cast("q")
        done = torch.cuda.Event() if on_gpu else None
        return _Twin(host, words, places.view(-1, rows).numpy(), lines.view(shape).numpy(), done)

    @property
    def done(self) -> torch.cuda.Event | None:
        """Recorded behind the last launch; None on a CPU."""
        return self._twins[self.turn].done

    def places(self, rows: int, copy: int = 0, *, blocks: bool = False) -> Places:
        """Return where the first `rows` rows stand, for the layers that this copy describes. blocks: as of `Places`."""
        if not len(self._places):
            return Places(self.lines[copy])
        sessions, indices = self._places.view(2, -1)
        return Places(self.lines[copy, :rows], sessions[:rows], indices[:rows], blocks)

    # --- of a session alone

    def fill(
        self,
        base: int,
        rows: int,
        *,
        copy: int = 0,
        token_ids: Sequence[int] = (),
        attention: AttentionCache | None = None,
        others: Sequence[AttentionCache] = (),
        recurrent: RecurrentCache | None = None,
    ) -> None:
        """Wait for the last launch, then set everything about a step: its rows, as `set_rows` does, and its caches."""
        # What was sent last must have left before it is overwritten.
        self.wait()
        self.set_rows(base, rows, copy=copy, token_ids=token_ids)
        self._set_caches(self._line_of(copy, 0), attention, others, recurrent)

    def set_rows(self, base: int, rows: int, *, copy: int = 0, token_ids: Sequence[int] = ()) -> None:
        """Set where the step's rows stand, for the session whose caches were filled in; to be called behind `wait`.

        token_ids: of the rows, or none where activations come.
        """
        words, at = self._words, self._line_of(copy, 0)
        words[at], words[at + 1] = base, rows
        for word, token in enumerate(token_ids):
            words[word] = token

    # --- of several sessions

    def begin(self) -> None:
        """Take the next twin, wait for the last launch that read it, and forget all its rows."""
        self.turn = self._next = (self._next + 1) % len(self._twins)
        twin = self._twins[self.turn]
        self._words = twin.words
        self._begun[self.turn] += 1
        self.wait()
        twin.placed[:] = -1
        twin.lines[:, :, (ROWS.value, COUNTED.value, DEFERRED.value)] = 0

    def mark(self) -> tuple[int, int]:
        """Return by what `take_up` knows the step that was begun last."""
        return self.turn, self._begun[self.turn]

    def take_up(self, mark: tuple[int, int]) -> bool:
        """Go on with a step that was begun before others; return False where its twin has another step by now."""
        turn, begun = mark
        if self._begun[turn] != begun:
            return False
        self.turn, self._words = turn, self._twins[turn].words
        return True

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Set the tokens of the step's rows, from the first one on."""
        self._words[: len(token_ids)] = array("q", token_ids)

    def add(
        self,
        session: int,
        first_row: int,
        base: int,
        rows: int,
        *,
        copy: int = 0,
        token_ids: Sequence[int] = (),
        uncommitted: bool = False,
        first_sum: int = 0,
        behind: int | None = None,
        deferred: int | None = None,
        attention: AttentionCache | None = None,
        others: Sequence[AttentionCache] = (),
        recurrent: RecurrentCache | None = None,
    ) -> None:
        """Add a session's rows to the step, behind those of the sessions before it.

        first_row: the number of rows before it. base: the first row's position. uncommitted: a commit says later which
        of the rows count. first_sum: as of `FIRST_SUM`. behind: the session's number in the step before, where
        `complete_step` puts in the first row's position and tokens; `base` is then the highest that it may be.
        deferred: where the row is recorded that recurrent layers advance by first, as of `RecurrentCache`.
        """
        # Words lie side by side: what is too much would be another session's.
        assert first_row + rows <= self._rows
        assert session < self._sessions
        words, first = self._words, self._rows + first_row
        if rows == 1:
            # As most are: of many sessions this is what the host does longest before the device begins.
            words[first], words[first + self._rows] = session, 0
        else:
            words[first : first + rows] = array("q", (session,)) * rows
            words[first + self._rows : first + self._rows + rows] = self._numbers[:rows]
        for word, token in enumerate(token_ids, first_row):
            words[word] = token
        line = self._line_of(copy, session)
        words[line : line + 3] = array("q", (base, rows, first_row))
        words[line + _FIRST_SUM : line + _FIRST_SUM + 5] = array(
            "q",
            (
                first_sum,
                0 if behind is None else behind + 1,
                0,
                0 if uncommitted else rows,
                0 if deferred is None else deferred + 1,
            ),
        )
        self._set_caches(line, attention, others, recurrent)

    def _line_of(self, copy: int, session: int) -> int:
        """Return where a session's numbers begin among all words."""
        return self._at + copy * self._copy_stride + session * self._line

    def _set_caches(
        self,
        line: int,
        attention: AttentionCache | None,
        others: Sequence[AttentionCache],
        recurrent: RecurrentCache | None,
    ) -> None:
        """Set where the caches of a session lie, whose numbers begin at the word `line`."""
        words = self._words
        if recurrent is not None:
            words[line + STATE.value : line + ROOM.value + 1] = array("q", recurrent.addresses)
        first = line + _FIRST_PAGE
        for cache in () if attention is None else (attention, *others):
            pages = len(cache.addresses)
            assert pages <= self._pages
            words[first : first + pages] = array("q", cache.addresses)
            first += self._pages

    # --- on their way

    def send(self) -> None:
        """Queue the copy to the device; in the graph of a step of one session this is the first node."""
        self._tensor.copy_(self._twins[self.turn].tensor, non_blocking=True)

    def record_launch(self) -> None:
        """Note that a launch was queued that sends them: `wait` waits for it."""
        if (done := self.done) is not None:
            done.record()

    def wait(self) -> None:
        """Wait until the last launch that read the same twin is done."""
        if (done := self.done) is not None:
            done.synchronize()
