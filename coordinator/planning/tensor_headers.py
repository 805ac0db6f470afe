"""Names, element types and shapes of a checkpoint's tensors, from the headers of its safetensors files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.prefix.disk.safetensors_file import MAX_HEADER_BYTES
from coordinator.text.tokenizer import read_json_object
from services.errors import DataLoss, InvalidArgument, NotFound, Unimplemented
from services.messages.tensors import ITEM_BYTES

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as stored. dtype: in the file's words, like "BF16"."""

    dtype: str
    shape: tuple[int, ...]

    def element_type(self, name: str) -> str:
        """In flashsplit's words. Raises Unimplemented for one that weights cannot have, as in quantised files."""
        if self.dtype not in _DTYPES:
            raise Unimplemented(
                f"tensor {name} is stored as {self.dtype}: only F32, BF16 and F16 are served", field=name
            )
        return _DTYPES[self.dtype]

    def size_bytes(self, name: str, dtype: str | None) -> int:
        """Bytes on a device. dtype: what matrices are cast to; vectors keep theirs, but for biases of projections."""
        stored = self.element_type(name)
        cast = dtype is not None and (len(self.shape) > 1 or name.endswith("_proj.bias"))
        return math.prod(self.shape) * ITEM_BYTES[dtype if cast and dtype is not None else stored]


def read_headers(directory: Path, field: str) -> dict[str, TensorHeader]:
    """By name, over all files. field: the option that names the directory.

    Raises NotFound for a missing file, InvalidArgument for a malformed index, DataLoss for what is no safetensors file.
    """
    names = [_SINGLE]
    if (directory / _INDEX).is_file():
        weight_map = read_json_object(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise InvalidArgument(f"{directory / _INDEX} has no weight_map", field=field)
        names = sorted({str(name) for name in weight_map.values()})
    headers: dict[str, TensorHeader] = {}
    for name in names:
        if Path(name).name != name:
            raise InvalidArgument(
                f"{directory / _INDEX} names {name!r}, which is not a file of that directory", field=field
            )
        headers |= _read_file(directory / name, field)
    return headers


def _read_file(path: Path, field: str) -> dict[str, TensorHeader]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except FileNotFoundError:
        raise NotFound(f"weight file {path} is missing", field=field) from None
    try:
        described = {name: value for name, value in json.loads(text).items() if name != "__metadata__"}
        return {
            name: TensorHeader(str(value["dtype"]), tuple(int(extent) for extent in value["shape"]))
            for name, value in described.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataLoss(
            f"weight file {path} cannot be read ({error}): it is truncated or not safetensors", field=field
        ) from error
