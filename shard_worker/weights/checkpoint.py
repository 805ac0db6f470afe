"""A Hugging Face checkpoint directory: its configuration, its tensors in mapped safetensors files, its fingerprint.

It reads; it never writes and never unpickles. It must not know model families.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from services.model.checkpoint_files import TensorHeader, missing_file, read_config, unreadable_file, weight_files
from services.model.safetensors_header import LENGTH_BYTES
from shard_worker.device.dtypes import dtype_from_name

_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Checkpoint:
    """One checkpoint directory, whose tensors are read when they are asked for.

    config: its config.json. headers: element type and shape of every tensor by name.
    """

    def __init__(self, directory: str | Path, field: str = "--model") -> None:
        """Map the files. field: the option that named the directory, for errors.

        Raises NotFound when the directory, its config.json or a named weight file is missing, InvalidArgument when a
        JSON file is malformed and DataLoss when a weight file is truncated.
        """
        self.directory = Path(directory)
        self._field = field
        self.config: Mapping[str, Any] = read_config(self.directory, field)
        self._files = {path: self._open(path) for path in weight_files(self.directory, field)}
        self._holder = {name: handle for handle in self._files.values() for name in list(handle.keys())}
        self.headers: Mapping[str, TensorHeader] = {name: self._header(name) for name in self._holder}
        self._matrices: dict[str, torch.Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self.headers[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored element type. Raises Unimplemented for one that is not served."""
        return dtype_from_name(self.headers[name].dtype(name))

    def size_bytes(self, name: str) -> int:
        """Return the bytes of a tensor as stored. Raises as `dtype`."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor over the mapped file, with its stored dtype. Copy it before keeping it."""
        return self._holder[name].get_tensor(name)

    def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of a tensor on a device."""
        return self.tensor(name).to(device=device, dtype=dtype, copy=True)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Return a few rows of a matrix, [len(indices), columns], read from the mapped file."""
        # The matrix is made once: of every tensor or slice that safetensors makes it leaks some bytes, as of its 0.8.0.
        if name not in self._matrices:
            self._matrices[name] = self.tensor(name)
        return F.embedding(torch.tensor(indices), self._matrices[name])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash over the configuration, the tensors' headers and evenly spread samples of the contents.

        It does not depend on path, file times and the split; two trainings of one architecture differ in it.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in sorted(self._files, key=lambda path: path.name):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
                digest.update(file.read(header_bytes))
                first = LENGTH_BYTES + header_bytes
                for sample in range(_SAMPLES):
                    file.seek(first + (size - first) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:32]

    def _header(self, name: str) -> TensorHeader:
        view = self._holder[name].get_slice(name)
        return TensorHeader(view.get_dtype(), tuple(view.get_shape()))

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise missing_file(path, self._field) from None
        except (SafetensorError, OSError) as error:
            raise unreadable_file(path, self._field, error) from error
