"""What every way of packing matrices needs when it reads headers: the stored tensors of a matrix, and lists of modules.

A matrix `x.weight` is the weight of the module `x`; its parts are stored beside it, as `x.weight_scale` or so.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from services.errors import InvalidArgument, Unimplemented
from services.model.safetensors_header import CODE_BYTES
from services.model.tensor_headers import PackedMatrix, TensorHeader

CONFIG_KEY = "quantization_config"
"""The key of config.json that says how matrices are packed."""

FLOATS = ("F32", "BF16", "F16")
"""Element types of scales that are plain floating point numbers."""


class Parts:
    """The stored tensors of one matrix, gathered and checked one after the other."""

    def __init__(self, module: str, stored: Mapping[str, TensorHeader], directory: Path) -> None:
        """module: whose weight it is. stored: all tensors of the checkpoint. directory: named in errors."""
        self.module, self._stored, self._directory = module, stored, directory
        self._taken: dict[str, str] = {}

    def take(
        self, role: str, suffix: str, codes: Collection[str], shapes: Sequence[tuple[int, ...]] = ()
    ) -> TensorHeader:
        """Take a part and return its header. role: what it is. suffix: what its name has behind the module's and a dot.

        codes: the element types that it may have. shapes: those that it may have, any where there are none.

        Raises InvalidArgument for a part that is missing or that has another element type or shape.
        """
        name = f"{self.module}.{suffix}"
        header = self._stored.get(name)
        if header is None:
            raise InvalidArgument(
                f"tensor {name} is missing in {self._directory}: {self.module} is packed, and it belongs to it",
                reason="TENSOR_MISSING",
                field=name,
            )
        if header.code not in codes:
            raise InvalidArgument(
                f"tensor {name} in {self._directory} is stored as {header.code}; it must be {' or '.join(codes)}",
                reason="TENSOR_DTYPE",
                field=name,
            )
        if shapes and header.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise InvalidArgument(
                f"tensor {name} in {self._directory} has shape {list(header.shape)}; it must be {expected} by what "
                f"{CONFIG_KEY} in config.json says",
                reason="TENSOR_SHAPE",
                field=name,
            )
        self._taken[role] = name
        return header

    def take_matrix(self, role: str, suffix: str, codes: Collection[str]) -> tuple[int, int]:
        """Take a part that has rows and columns, as `take` does, and return how many."""
        shape = self.take(role, suffix, codes).shape
        if len(shape) != 2 or 0 in shape:
            name = f"{self.module}.{suffix}"
            raise InvalidArgument(
                f"tensor {name} in {self._directory} has shape {list(shape)}; it must be a matrix",
                reason="TENSOR_SHAPE",
                field=name,
            )
        return shape[0], shape[1]

    def has(self, suffix: str, code: str | None = None) -> bool:
        """Return whether there is a part of this name, and of this element type where one is given."""
        header = self._stored.get(f"{self.module}.{suffix}")
        return header is not None and code in (None, header.code)

    def matrix(
        self,
        format_name: str,
        shape: tuple[int, int],
        bits: int,
        group: int,
        loaded_bytes: int,
        *,
        group_rows: int = 1,
        symmetric: bool = True,
    ) -> TensorHeader:
        """Return the header of the matrix that the parts taken make; the arguments are those of `PackedMatrix`."""
        stored = [self._stored[name] for name in self._taken.values()]
        stored_bytes = sum(math.prod(header.shape) * CODE_BYTES[header.code] for header in stored)
        taken = dict(self._taken)
        # Codes of 4 bits that stand for numbers of a table, or that are no whole blocks, become numbers of 8 bits.
        in_4_bits = bits == 4 and format_name not in ("mxfp4", "nvfp4") and shape[1] % 64 == 0
        cpu_bits = None if format_name == "float8" else 4 if in_4_bits else 8
        packed = PackedMatrix(
            format_name, bits, group, stored_bytes, loaded_bytes, group_rows, symmetric, taken, cpu_bits
        )
        return TensorHeader(format_name, shape, packed)


def scale_bytes(code: str) -> int:
    """Return the bytes of a scale once loaded: powers of two, which are stored in 8 bits, are widened to bfloat16."""
    return CODE_BYTES["BF16" if code == "F8_E8M0" else code]


def float8_matrix(parts: Parts, shape: tuple[int, int], group_rows: int, group: int, scale_code: str) -> TensorHeader:
    """Return the header of a matrix in the format `float8`: loaded, it has a scale for every row of every block."""
    rows, columns = shape
    loaded_bytes = rows * columns + rows * math.ceil(columns / group) * scale_bytes(scale_code)
    return parts.matrix("float8", shape, 8, group, loaded_bytes, group_rows=group_rows)


def code_bytes(shape: tuple[int, int], bits: int) -> int:
    """Return what the codes of a matrix take in memory: those of 4 bits as many, where columns come in blocks of 64."""
    rows, columns = shape
    return rows * columns // (2 if bits == 4 and columns % 64 == 0 else 1)


def integer_matrix(
    parts: Parts,
    format_name: str,
    shape: tuple[int, int],
    bits: int,
    group: int,
    scale_code: str,
    *,
    zeros: bool,
    reordered: bool = False,
) -> TensorHeader:
    """Return the header of a matrix of whole numbers with a scale for each group of a row's columns.

    zeros: whether groups have zero points of their own, which take 4 bytes each once loaded. reordered: whether columns
    of a group are no neighbours.
    """
    rows, columns = shape
    groups = rows * math.ceil(columns / group)
    loaded_bytes = code_bytes(shape, bits) + groups * scale_bytes(scale_code)
    if zeros:
        loaded_bytes += groups * CODE_BYTES["F32"]
    if reordered:
        loaded_bytes += columns * CODE_BYTES["I32"]
    return parts.matrix(format_name, shape, bits, group, loaded_bytes, symmetric=not zeros)


def nvfp4_matrix(parts: Parts, shape: tuple[int, int]) -> TensorHeader:
    """Return the header of a matrix in the format `nvfp4`, whose codes and scale of all are taken already."""
    rows, columns = shape
    group = 16
    parts.take("scales", "weight_scale", ("F8_E4M3",), [(rows, math.ceil(columns / group))])
    loaded_bytes = code_bytes(shape, 4) + rows * (math.ceil(columns / group) + CODE_BYTES["F32"])
    return parts.matrix("nvfp4", shape, 4, group, loaded_bytes)


def mxfp4_matrix(parts: Parts, shape: tuple[int, int], scales: str = "weight_scale") -> TensorHeader:
    """Return the header of a matrix in the format `mxfp4`, whose codes are taken already. scales: what the part is
    called."""
    rows, columns = shape
    group = 32
    parts.take("scales", scales, ("U8", "F8_E8M0"), [(rows, math.ceil(columns / group))])
    loaded_bytes = code_bytes(shape, 4) + rows * math.ceil(columns / group) * scale_bytes("F8_E8M0")
    return parts.matrix("mxfp4", shape, 4, group, loaded_bytes)


def block_extents(key: str, value: object) -> tuple[int, int]:
    """Return the rows and columns of a block, which stand under a key of quantization_config.

    Raises InvalidArgument for what is not two whole numbers above 0.
    """
    if isinstance(value, list) and len(value) == 2 and all(type(extent) is int and extent > 0 for extent in value):
        return value[0], value[1]
    raise InvalidArgument(
        f"config.json: {CONFIG_KEY}.{key} is {value!r}; it must be two whole numbers above 0, rows and columns",
        field=f"{CONFIG_KEY}.{key}",
    )


def group_size(settings: Mapping[str, object], *keys: str) -> int | None:
    """Return how many columns share a scale, under the first of these keys that is given; None for all columns.

    Raises InvalidArgument for what is no whole number above 0, nor -1 for all.
    """
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if type(value) is not int or (value < 1 and value != -1):
                raise InvalidArgument(
                    f"config.json: {CONFIG_KEY}.{key} is {value!r}; it must be a whole number above 0, or -1",
                    field=f"{CONFIG_KEY}.{key}",
                )
            return None if value == -1 else value
    raise InvalidArgument(f"config.json: {CONFIG_KEY}.{keys[0]} is missing", field=f"{CONFIG_KEY}.{keys[0]}")


def names_module(patterns: Iterable[str], module: str) -> bool:
    """Return whether a list in quantization_config names a module.

    An entry is a regular expression behind "re:", a pattern with asterisks, or some neighbouring parts of the dotted
    name, such as "lm_head", "mlp.gate" or "model.layers.0": it names all modules inside what it names.

    Raises InvalidArgument for what is no regular expression.
    """
    return any(_names(pattern, module) for pattern in patterns)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise InvalidArgument(
                f"config.json: {pattern!r} in {CONFIG_KEY} is no regular expression: {error}", field=CONFIG_KEY
            ) from error
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def module_list(settings: Mapping[str, object], *keys: str) -> tuple[str, ...]:
    """Return the modules that a list in quantization_config names, under the first of these keys that is given.

    Raises InvalidArgument for what is no list of strings.
    """
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
                raise InvalidArgument(
                    f"config.json: {CONFIG_KEY}.{key} is {value!r}; it must be a list of module names",
                    field=f"{CONFIG_KEY}.{key}",
                )
            return tuple(value)
    return ()


def check_unlisted(unpacked: Iterable[str], key: str, packed: Iterable[str]) -> None:
    """Check that no packed matrix is of a module that the configuration lists as unpacked.

    unpacked: the list. key: its key in quantization_config. packed: the names of all packed matrices.

    Raises InvalidArgument naming the matrix.
    """
    unpacked = tuple(unpacked)
    for name in packed:
        if names_module(unpacked, name.removesuffix(".weight")):
            raise InvalidArgument(
                f"tensor {name} is packed, but config.json lists its module in {CONFIG_KEY}.{key}: one of the two is "
                "wrong",
                reason="PACKING_MISMATCH",
                field=name,
            )


def refused(key: str, value: object, accepted: str) -> Unimplemented:
    """Return the error for a setting in quantization_config that is not served. accepted: what is, or what to do."""
    return Unimplemented(
        f"config.json: {CONFIG_KEY}.{key} {value!r} is not supported: {accepted}", field=f"{CONFIG_KEY}.{key}"
    )
