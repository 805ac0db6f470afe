"""What a Hugging Face checkpoint directory says without its weights: JSON files, weight files, their tensors' headers.

It reads and never writes. It must not know model families.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from services.dtypes import WEIGHT_DTYPES
from services.errors import DataLoss, InvalidArgument, NotFound, Unimplemented
from services.model.safetensors_header import DTYPE_CODES, DTYPE_OF_CODE, read_header

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as stored. code: its element type in safetensors' words, like "BF16"."""

    code: str
    shape: tuple[int, ...]

    def dtype(self, name: str) -> str:
        """Return the element type, like "bfloat16". name: the tensor's, for the error.

        Raises Unimplemented for a type that weights cannot have, as in quantised files.
        """
        dtype = DTYPE_OF_CODE.get(self.code)
        if dtype not in WEIGHT_DTYPES:
            *first, last = (DTYPE_CODES[dtype] for dtype in WEIGHT_DTYPES)
            raise Unimplemented(
                f"tensor {name} is stored as {self.code}: only {', '.join(first)} and {last} are served", field=name
            )
        return dtype


def read_json_object(path: Path, field: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a file. field: the option that named the file or its directory.

    Raises NotFound when there is no such file, InvalidArgument when it cannot be read or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(
            f"{field or 'checkpoint'} {str(path.parent)!r} has no {path.name}: name a Hugging Face checkpoint "
            "directory",
            field=field,
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} must hold a JSON object", field=field)
    return value


def read_config(directory: str | Path, field: str = "--model") -> dict[str, Any]:
    """Return a checkpoint's config.json.

    Raises NotFound when the directory or the file is missing, InvalidArgument when the file holds no JSON object.
    """
    # Unlike `Path.is_dir`, it takes a name that is too long for one that does not exist.
    if not os.path.isdir(directory):
        raise NotFound(f"{field} {str(directory)!r} is not a directory on this host", field=field)
    return read_json_object(Path(directory) / CONFIG, field)


def weight_files(directory: Path, field: str) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that its index names, else the single one.

    Raises InvalidArgument for an index without a weight_map or with names that lead out of the directory.
    """
    index = directory / INDEX
    if not index.exists():
        return [directory / SINGLE]
    weight_map = read_json_object(index, field).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise InvalidArgument(f"{index} has no weight_map", field=field)
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise InvalidArgument(f"{index} names {name!r}, which is not a file of that directory", field=field)
    return [directory / name for name in names]


def read_headers(directory: Path, field: str) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a checkpoint by name. field: the option that named the directory.

    Raises NotFound for a missing file, DataLoss for one that is not safetensors, and what `weight_files` raises.
    """
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(directory, field):
        try:
            with path.open("rb") as file:
                header = read_header(functools.partial(_read, file), path.stat().st_size)
        except FileNotFoundError:
            raise missing_file(path, field) from None
        except (DataLoss, OSError) as error:
            raise unreadable_file(path, field, error) from error
        headers |= {name: TensorHeader(entry.code, entry.shape) for name, entry in header.tensors.items()}
    return headers


def missing_file(path: Path, field: str) -> NotFound:
    """Return the error for a weight file that is not there."""
    return NotFound(f"weight file {path} is missing", field=field)


def unreadable_file(path: Path, field: str, error: Exception) -> DataLoss:
    """Return the error for a weight file that cannot be read."""
    return DataLoss(f"weight file {path} cannot be read ({error}): it is truncated or not safetensors", field=field)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
