"""What a session has sent to the next stage, or to a draft elsewhere: rows that this one can send again where that is
lost, or has lost the session.

They are copies in host memory, made of what leaves the stage for the host in any case. All sessions of a worker share a
bound; one whose rows find no room keeps none any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.messages.steps import FeatureSlice, Forward
from services.messages.tensors import WireTensor


class RowBudget:
    """How many bytes of sent rows a worker keeps; on any thread.

    size_bytes: the most. used_bytes: those of all sessions by now. spare: frees some that nobody may ask for, and
    returns whether there were any.
    """

    def __init__(self, size_bytes: int, spare: Callable[[], bool] = lambda: False) -> None:
        self.size_bytes, self.spare = size_bytes, spare
        self._used_bytes = 0
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        self._counted(0)
        return self._used_bytes

    def free(self, count: int) -> None:
        """Count so many bytes fewer, from the next call on: no lock is taken, as garbage may be collected at any place,
        also where the lock is held."""
        self._freed.append(count)

    def take(self, count: int) -> bool:
        """Count so many more bytes, fewer where it is negative, and return whether there is room for them."""
        while not self._counted(count):
            if not self.spare():
                return False
        return True

    def _counted(self, count: int) -> bool:
        with self._lock:
            while self._freed:
                self._used_bytes -= self._freed.popleft()
            fits = count <= 0 or self._used_bytes + count <= self.size_bytes
            self._used_bytes += count if fits else 0
            return fits


@dataclass(slots=True)
class _Column:
    """A tensor's rows. capture_index: of features, as of `FeatureSlice`. width: elements of a row."""

    dtype: str
    width: int
    row_bytes: int
    capture_index: int | None
    data: bytearray = field(default_factory=bytearray)

    @classmethod
    def like(cls, tensor: WireTensor, capture_index: int | None = None) -> _Column:
        rows, width = tensor.shape
        return cls(tensor.dtype, width, len(tensor.data) // rows, capture_index)

    def rows(self, first: int, last: int) -> WireTensor:
        # A copy: what is lent out could not grow any more.
        data = bytes(self.data[first * self.row_bytes : last * self.row_bytes])
        return WireTensor(self.dtype, (last - first, self.width), data)


class SentRows:
    """The rows that one session has sent, by position; on any thread: the event loop ends a session while the device
    thread adds to what it has sent.

    token_ids: those of the session from position 0 on, as far as their rows were sent or restored. first: from this
    position on the rows are kept; None where there was no room for them.
    """

    def __init__(self, budget: RowBudget) -> None:
        self._budget = budget
        self.token_ids: list[int] = []
        self.first: int | None = 0
        self._columns: list[_Column] = []
        """The activation, then the features."""
        self._counted_bytes = 0
        self._lock = threading.RLock()

    def __del__(self) -> None:
        self._budget.free(self._counted_bytes)

    def begin(self, token_ids: tuple[int, ...]) -> None:
        """Begin behind these tokens, which were restored: of them there are no rows."""
        self.token_ids, self.first = [*token_ids], len(token_ids)

    def add_tokens(self, base: int, token_ids: tuple[int, ...]) -> None:
        """Note the tokens of a step from position `base` on, in place of any that did not count."""
        del self.token_ids[base:]
        self.token_ids += token_ids

    def add(self, sent: Forward) -> None:
        """Keep the rows of a step as the next stage gets it. What was kept from its first position on is forgotten: it
        did not count."""
        self.add_tokens(sent.base_position, sent.token_ids)
        if sent.activation is not None and sent.token_ids:
            self.add_rows([FeatureSlice(sent.base_position, sent.activation), *sent.features])

    def add_rows(self, pieces: Sequence[FeatureSlice]) -> None:
        """Keep rows of one or more tensors, as `add` does: each time the same ones."""
        base, rows = pieces[0].start_position, pieces[0].features.shape[0]
        with self._lock:
            if self.first is None:
                return
            if not self._columns:
                self._columns = [_Column.like(piece.features, piece.capture_index) for piece in pieces]
            at = base - self.first
            added = sum((at + rows) * column.row_bytes - len(column.data) for column in self._columns)
            if not self._budget.take(added):
                self.forget()
                return
            self._counted_bytes += added
            for column, piece in zip(self._columns, pieces, strict=True):
                column.data[at * column.row_bytes :] = piece.features.data

    @property
    def end(self) -> int | None:
        """The position behind the last row that is kept; None where there was no room for them."""
        with self._lock:
            if self.first is None or not self._columns:
                return self.first
            return self.first + len(self._columns[0].data) // self._columns[0].row_bytes

    def forget(self) -> None:
        """Keep no rows any more."""
        with self._lock:
            self._budget.free(self._counted_bytes)
            self._columns, self._counted_bytes, self.first = [], 0, None

    def again(self, forward: Forward, *, features: bool) -> Forward:
        """Return a step with its rows as they were sent before; they must be kept. features: whether with those."""
        first = forward.base_position
        activation, *pieces = self.rows(first, first + len(forward.token_ids))
        return replace(forward, activation=activation.features, features=tuple(pieces) if features else ())

    def rows(self, first: int, last: int) -> list[FeatureSlice]:
        """Return the rows of the tokens [first, last) of each tensor; they must be kept."""
        assert self.first is not None
        at = first - self.first
        return [
            FeatureSlice(first, column.rows(at, at + last - first), column.capture_index) for column in self._columns
        ]
