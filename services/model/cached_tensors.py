"""What a session keeps in memory for one layer, tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from services.dtypes import ITEM_BYTES

PAGE_ROWS = 256
"""Positions of a page of keys and values on a GPU. On a CPU so many at a time are counted as written."""

CUT_ROWS = 256
"""So many positions at least can a session be cut by although sliding layers give back what is behind their windows:
more than the rows of steps that were launched and do not count, and than most of what one gives up that goes on
elsewhere."""


def held_positions(length: int, window: int | None, step_rows: int = 1) -> int:
    """Return for how many positions a session of `length` tokens has memory at most, in layers that look at so many.

    window: None for all. step_rows: rows of a step at its end, before which nothing is given back. What is behind the
    window and less than a page is there too, and pages are whole.
    """
    if window is None:
        return length
    pages = -(-(PAGE_ROWS - 1 + CUT_ROWS + window - 1 + step_rows) // PAGE_ROWS)
    return min(length, pages * PAGE_ROWS)


class Per(StrEnum):
    """What a cached tensor's shape is of.

    TOKEN: one position; the tensor grows with the session, and a prefix keeps the rows of its tokens. SESSION: the
    whole tensor, whatever the length; a prefix keeps a copy. BLOCK_ROW: one row of the largest verify; nothing of it
    outlives the verify's commit.
    """

    TOKEN = "token"
    SESSION = "session"
    BLOCK_ROW = "block_row"


class CacheDtype(StrEnum):
    """How the element type of a cached tensor follows from those of the loaded model.

    KEYS_AND_VALUES: what --kv-dtype says, else the weights'. ACTIVATIONS: the weights'. FLOAT32: always float32.
    """

    KEYS_AND_VALUES = "keys_and_values"
    ACTIVATIONS = "activations"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor that a session keeps for one layer.

    name: what snapshots call it behind `layers.N.`. shape: the extents of one position, of one row or of the whole, as
    `per` says. window: of positions, how many of the last ones are looked at; None for all.
    """

    name: str
    shape: tuple[int, ...]
    per: Per
    dtype: CacheDtype
    window: int | None = None

    def size_bytes(self, dtype: str, kv_dtype: str) -> int:
        """Bytes of one position, of one row or of the whole. dtype, kv_dtype: names of the model's element types."""
        names = {CacheDtype.KEYS_AND_VALUES: kv_dtype, CacheDtype.ACTIVATIONS: dtype, CacheDtype.FLOAT32: "float32"}
        return math.prod(self.shape) * ITEM_BYTES[names[self.dtype]]
