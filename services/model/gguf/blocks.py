"""The block types of GGUF: what a block takes in a file, and what its values take once they are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

_BY_TABLE = frozenset(("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"))


@dataclass(frozen=True, slots=True)
class HeldForm:
    """How a worker holds the values of a packed type, which computing needs in another form than files have.

    bits: of a code. group: how many values share a scale. group_bytes: of the scale of a group and of its offset, if it
    has one. block_bytes: of what a whole block has beside that.
    """

    bits: int
    group: int
    group_bytes: int
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of tensors. name: in GGUF's words, like "Q4_K".

    values, bytes: how many values of a row one block has, and its bytes. held: how they are held once loaded; None for
    types that hold plain numbers, and for those that are not served.
    """

    name: str
    values: int
    bytes: int
    held: HeldForm | None = None

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of so many values in a file; they are whole blocks."""
        return columns // self.values * self.bytes

    def held_bits(self, columns: int) -> int:
        """Return how many bits the code of a value takes once loaded, in rows of so many.

        Codes of 4 bits lie in blocks of 64; where a row is no multiple of that they are widened to 8.
        """
        assert self.held is not None
        return 8 if columns % 64 else self.held.bits

    def cpu_bits(self, columns: int) -> int:
        """Return how many bits the whole numbers take that CPUs multiply by, in rows of so many values: what codes
        stand for by a table takes 8."""
        return 8 if self.name in _BY_TABLE else self.held_bits(columns)

    def held_row_bytes(self, columns: int, run: int | None = None) -> int:
        """Return the bytes that a row of so many values takes once loaded.

        run: how many columns stay beside each other where they are put in another order; groups become no larger.
        """
        assert self.held is not None
        groups = columns // math.gcd(self.held.group, run or 0)
        blocks = columns // math.gcd(self.values, run or 0)
        return columns * self.held_bits(columns) // 8 + groups * self.held.group_bytes + blocks * self.held.block_bytes


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, HeldForm(4, 32, 2)),
    3: BlockType("Q4_1", 32, 20, HeldForm(4, 32, 4)),
    6: BlockType("Q5_0", 32, 22, HeldForm(8, 32, 2)),
    7: BlockType("Q5_1", 32, 24, HeldForm(8, 32, 4)),
    8: BlockType("Q8_0", 32, 34, HeldForm(8, 32, 2)),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84, HeldForm(4, 16, 2, 4)),
    11: BlockType("Q3_K", 256, 110, HeldForm(4, 16, 1, 2)),
    12: BlockType("Q4_K", 256, 144, HeldForm(4, 32, 2, 4)),
    13: BlockType("Q5_K", 256, 176, HeldForm(8, 32, 2, 4)),
    14: BlockType("Q6_K", 256, 210, HeldForm(8, 16, 1, 2)),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66, HeldForm(8, 32, 2, 2)),
    17: BlockType("IQ2_XS", 256, 74, HeldForm(8, 16, 2, 2)),
    18: BlockType("IQ3_XXS", 256, 98, HeldForm(8, 32, 2, 2)),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, HeldForm(4, 32, 2)),
    21: BlockType("IQ3_S", 256, 110, HeldForm(8, 32, 1, 2)),
    22: BlockType("IQ2_S", 256, 82, HeldForm(8, 16, 2, 2)),
    23: BlockType("IQ4_XS", 256, 136, HeldForm(4, 32, 1, 2)),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17, HeldForm(4, 32, 2)),
    40: BlockType("NVFP4", 64, 36, HeldForm(4, 16, 2)),
    41: BlockType("Q1_0", 128, 18),
}

"""All types by the number that stands in files, whether their values can be used here or not."""

DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The element types of those that hold plain numbers which weights can be."""

SERVED = (*DENSE, *(kind.name for kind in BLOCK_TYPES.values() if kind.held is not None))
"""The names of the types whose values can be used."""
