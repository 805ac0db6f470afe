"""The element types of tensors, by name, and the size of an element of each."""

from __future__ import annotations

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""What weights and activations can be."""

FLOAT8 = "float8_e4m3fn"
"""What attention keys and values can be kept in, apart from the type of the weights."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, FLOAT8: 1}
"""Bytes of one element."""
