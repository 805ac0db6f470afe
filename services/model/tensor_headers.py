"""The tensors of a checkpoint as a model asks for them: by name, with element type and shape, without their contents.

A matrix that is stored packed, as codes and scales, has one header under its usual name and with its true shape, which
says what it is packed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.dtypes import ITEM_BYTES, WEIGHT_DTYPES
from services.errors import Unimplemented
from services.model.safetensors_header import DTYPE_CODES, DTYPE_OF_CODE


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """How a matrix is stored that is not one dense tensor.

    format: the module of `shard_worker.weights.formats` that reads it, for files of Hugging Face; for others what the
    file calls it. bits: those of a code. group: how many columns share a scale; for more than one row, where
    `group_rows` is more than 1. symmetric: whether the code in the middle stands for 0 in all groups. parts: the names
    of its stored tensors by what they are, as the format calls them. stored_bytes: what is read of the file for it.
    loaded_bytes: memory that it takes once loaded, still packed. cpu_bits: of the whole numbers that CPUs multiply by,
    4 or 8; None where its elements are no multiples of their group's scale.
    """

    format: str
    bits: int
    group: int
    stored_bytes: int
    loaded_bytes: int
    group_rows: int = 1
    symmetric: bool = True
    parts: Mapping[str, str] = field(default_factory=dict)
    cpu_bits: int | None = None


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor. code: its element type as stored, in safetensors' words, like "BF16"; for a packed matrix what it is
    packed in. packed: how it is stored, None where it is one dense tensor."""

    code: str
    shape: tuple[int, ...]
    packed: PackedMatrix | None = None

    def dtype(self, name: str) -> str:
        """Return the element type of a dense tensor, like "bfloat16". name: the tensor's, for the error.

        Raises Unimplemented for a type that weights cannot have, as in files that are packed in an unknown way.
        """
        dtype = DTYPE_OF_CODE.get(self.code)
        if self.packed is not None or dtype not in WEIGHT_DTYPES:
            *first, last = (DTYPE_CODES[dtype] for dtype in WEIGHT_DTYPES)
            raise Unimplemented(
                f"tensor {name} is stored as {self.code}: only {', '.join(first)} and {last} are served, and matrices "
                "that are packed in a way that quantization_config in config.json names",
                field=name,
            )
        return dtype

    def check_served(self, name: str, *, matrix: bool) -> None:
        """Check that it is stored in a way that weights can be. name: the tensor's. matrix: whether it may be packed.

        Raises Unimplemented otherwise.
        """
        if self.packed is None or not matrix:
            self.dtype(name)

    def stored_bytes(self, name: str) -> int:
        """Return what is read of the file for it, in bytes. Raises as `dtype`."""
        if self.packed is not None:
            return self.packed.stored_bytes
        return math.prod(self.shape) * ITEM_BYTES[self.dtype(name)]
