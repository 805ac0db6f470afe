"""Packing the matrices of a 16-bit checkpoint while it is loaded (`--quantize`): which ones, in what, and their bytes.

Workers pack by this, and the planner counts by the same. It must not know contents; `shard_worker.weights.quantize`
chooses scales and codes.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.errors import InvalidArgument
from services.model.tensor_headers import PackedMatrix, TensorHeader

GROUPS = (128, 64, 32)
"""How many neighbouring columns of a row share a scale: the first of these that divides a matrix's columns."""

OPTIONS = {"--model": "--quantize", "--draft": "--quantize-draft"}
"""The option that has a checkpoint packed, by the one that names it."""

SCALE_BYTES = 2
"""A scale is a bfloat16."""

_RECIPE = 1
"""To be raised when the same checkpoint is packed to other numbers, so that prefixes of before are not taken up."""

_ENDS = ("embed_tokens.weight", "lm_head.weight")
_UNPACKED = ("in_proj_a.weight", "in_proj_b.weight")
"""Small matrices whose products decide how long a recurrent state lasts: all published packings leave them as they
are."""


class QuantizedTo(enum.StrEnum):
    """What an element of a packed matrix is, before it is multiplied by its group's scale."""

    INT8 = "int8"
    """A whole number from -127 to 127."""
    INT4 = "int4"
    """A whole number from -8 to 7."""
    FP8 = "fp8"
    """A float8_e4m3fn."""

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self is QuantizedTo.INT4 else 8


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a checkpoint are packed while it is loaded.

    to: what their elements become. ends: whether the embedding and lm_head are packed too, and not only the layers'.
    """

    to: QuantizedTo
    ends: bool = False

    def __str__(self) -> str:
        return f"{self.to}, head too" if self.ends else str(self.to)

    def fingerprint(self, of_checkpoint: str) -> str:
        """Return the fingerprint of a checkpoint of which matrices are packed so, from its own one."""
        recipe = f"{of_checkpoint} quantized {self.to} ends {self.ends} recipe {_RECIPE}"
        return hashlib.sha256(recipe.encode()).hexdigest()[:32]

    def headers(self, dense: Mapping[str, TensorHeader], directory: Path, field: str) -> dict[str, TensorHeader]:
        """Return a checkpoint's headers with those of packed matrices as they will be.

        directory: the checkpoint's. field: the option that asks for it. Both are for the error.

        Raises InvalidArgument for a checkpoint with a matrix that is packed already.
        """
        for name, header in dense.items():
            if header.packed is not None:
                raise InvalidArgument(
                    f"{field} {self.to} packs checkpoints of 16 or 32 bits: {name} in {directory} is packed already, "
                    f"as {header.packed.format}; leave out {field}, or name the checkpoint that it was made from",
                    field=field,
                )
        return {name: self._packed(name, header) for name, header in dense.items()}

    def _packed(self, name: str, header: TensorHeader) -> TensorHeader:
        group = self._group(name, header.shape)
        if group is None:
            return header
        rows, columns = header.shape
        loaded = rows * columns * self.to.bits // 8 + rows * (columns // group) * SCALE_BYTES
        bits = self.to.bits
        cpu_bits = None if self.to is QuantizedTo.FP8 else bits
        packed = PackedMatrix(str(self.to), bits, group, header.stored_bytes(name), loaded, cpu_bits=cpu_bits)
        return TensorHeader(header.code, header.shape, packed)

    def _group(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Return how many columns of a matrix share a scale; None for a tensor that is not packed."""
        is_end = name.endswith(_ENDS)
        is_taken = self.ends if is_end else "_proj" in name and not name.endswith(_UNPACKED)
        if len(shape) != 2 or not is_taken:
            return None
        # Bytes of 4-bit codes are those of whole blocks of 64 columns.
        groups = GROUPS[:2] if self.to is QuantizedTo.INT4 else GROUPS
        return next((group for group in groups if shape[1] % group == 0), None)
