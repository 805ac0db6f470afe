"""The tensors of a GGUF file under Hugging Face's names, and what llama.cpp's converter changed of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from services.model.gguf.container import GgufTensor
from services.model.stored_experts import ExpertPart


class Elements(StrEnum):
    """What the numbers of a tensor are of those that the checkpoint had."""

    SAME = "w"
    PLUS_ONE = "w + 1"
    MINUS_EXP = "-exp(w)"


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The order of a linear layer's value heads along one extent of a tensor.

    Checkpoints group them by key head: the heads of key head 0 first. GGUF tiles them: first one head of every key
    head, then the next one of each. first: how many rows stand before the heads, and stay. size: rows or columns of a
    head.
    """

    key_heads: int
    heads_per_key: int
    size: int
    first: int = 0

    @property
    def is_same(self) -> bool:
        """Whether both orders are one."""
        return 1 in (self.key_heads, self.heads_per_key)

    @property
    def heads(self) -> list[int]:
        """For every head, as checkpoints order them, its place in GGUF's order."""
        return [head * self.key_heads + key for key in range(self.key_heads) for head in range(self.heads_per_key)]


@dataclass(frozen=True, slots=True)
class InterleavedHalves:
    """The order of the rows of queries or keys, for RoPE of neighbours.

    RoPE turns pairs of elements: in checkpoints one from the first half of a head and one from the second, in GGUF two
    neighbours. count: how many heads there are. head_dim: rows of a head.
    """

    count: int
    head_dim: int

    first = 0
    size = 1

    @property
    def is_same(self) -> bool:
        """Whether both orders are one."""
        return self.head_dim == 2

    @property
    def heads(self) -> list[int]:
        """For every row, as checkpoints order them, its place in GGUF's order."""
        within = [2 * pair + half for half in (0, 1) for pair in range(self.head_dim // 2)]
        return [head * self.head_dim + row for head in range(self.count) for row in within]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint as it stands in a GGUF file.

    tensor: where it is stored. shape: that of the checkpoint's tensor. elements: what its numbers are. rows, columns:
    along which extent they are in another order, and which; None where they are not. scale: a float32 that all numbers
    are multiplied by, one for each of many experts; None for none.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    elements: Elements = Elements.SAME
    rows: HeadOrder | InterleavedHalves | None = None
    columns: HeadOrder | None = None
    scale: GgufTensor | None = None

    def of_expert(self, part: ExpertPart) -> StoredTensor:
        """Return an expert's matrix out of this tensor of all experts' [experts, rows, columns], or its biases, of
        [experts, rows]."""
        _, rows, *columns = self.shape
        row_bytes = self.tensor.type.row_bytes(*columns or [1])
        first, last, _ = part.rows.indices(rows)
        begin = self.tensor.begin + (part.expert * rows + first) * row_bytes
        shape = (last - first, *columns)
        own = replace(self.tensor, shape=shape, begin=begin, nbytes=shape[0] * row_bytes)
        scale = self.scale
        if scale is not None:
            scale = replace(scale, shape=(1,), begin=scale.begin + 4 * part.expert, nbytes=4)
        return StoredTensor(own, shape, scale=scale)

    @property
    def loaded_bytes(self) -> int:
        """The bytes that a packed matrix takes once it is loaded."""
        run = None if self.columns is None or self.columns.is_same else self.columns.size
        *rows, columns = self.shape
        row_bytes = self.tensor.type.held_row_bytes(columns, run)
        if self.scale is not None:
            row_bytes += 4 * (columns // (run or columns))
        return math.prod(rows) * row_bytes


def stored_unchanged(_name: str, tensor: GgufTensor, _config: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor of whose numbers the converter changes none: what `Architecture.stored_tensor` is then."""
    return StoredTensor(tensor, tensor.shape)
