"""A Hugging Face checkpoint directory: its configuration, its tensors in mapped safetensors files, its fingerprint.

Reads; never writes and never unpickles. Knows nothing of model families.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.errors import DataLoss, InvalidArgument, NotFound, Unimplemented

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """One checkpoint directory.

    Raises NotFound when the directory, its config.json or a named weight file is missing, InvalidArgument when a JSON
    file is malformed and DataLoss when a weight file is truncated.
    """

    def __init__(self, directory: str | Path, field: str = "--model") -> None:
        self.directory = Path(directory)
        self._field = field
        self.config: Mapping[str, Any] = read_config(self.directory, field)
        self._files = self._open_files()
        held = {path: list(handle.keys()) for path, handle in self._files.items()}
        self._where = {name: path for path, names in held.items() for name in names}

    @property
    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's stored element type. Raises Unimplemented for one that is not served, as in quantised files."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise Unimplemented(
                f"tensor {name} in {self.directory} is stored as {stored}: only F32, BF16 and F16 are served",
                field=name,
            )
        return _DTYPES[stored]

    def size_bytes(self, name: str) -> int:
        """Bytes of one tensor as stored."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor over the mapped file, with its stored dtype. Copy it before keeping it."""
        return self._files[self._where[name]].get_tensor(name)

    def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A copy of one tensor on a device."""
        return self.tensor(name).to(device=device, dtype=dtype, copy=True)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """A few rows of a matrix, [len(indices), columns], read from the mapped file."""
        view = self._slice(name)
        return torch.cat([view[index : index + 1] for index in indices])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash over configuration, tensor headers and evenly spread samples of the contents.

        Independent of path, file times and the split; two trainings of one architecture differ in it.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in sorted(self._files, key=lambda path: path.name):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                digest.update(file.read(header_bytes))
                for sample in range(_SAMPLES):
                    file.seek(8 + header_bytes + (size - 8 - header_bytes) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:32]

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    def _open_files(self) -> dict[Path, Any]:
        if (self.directory / _INDEX).exists():
            weight_map = _read_json(self.directory, _INDEX, self._field).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise InvalidArgument(f"{self.directory / _INDEX} has no weight_map", field=self._field)
            names = sorted({str(name) for name in weight_map.values()})
        else:
            names = [_SINGLE]
        for name in names:
            if Path(name).name != name:
                raise InvalidArgument(
                    f"{self.directory / _INDEX} names {name!r}, which is not a file of that directory",
                    field=self._field,
                )
        return {self.directory / name: self._open(self.directory / name) for name in names}

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise NotFound(f"weight file {path} is missing", field=self._field) from None
        except (SafetensorError, OSError) as error:
            raise DataLoss(
                f"weight file {path} cannot be read ({error}): it is truncated or not safetensors",
                field=self._field,
            ) from error


def read_config(directory: str | Path, field: str = "--model") -> Mapping[str, Any]:
    """config.json alone. Raises NotFound and InvalidArgument as `Checkpoint` does."""
    if not os.path.isdir(directory):
        raise NotFound(f"{field} {str(directory)!r} is not a directory on this host", field=field)
    return _read_json(Path(directory), "config.json", field)


def _read_json(directory: Path, name: str, field: str) -> dict[str, Any]:
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(
            f"{field} {str(directory)!r} has no {name}: name a Hugging Face checkpoint directory",
            field=field,
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} must hold a JSON object", field=field)
    return value
