"""A Hugging Face checkpoint directory: its config.json and its tensors in mapped safetensors files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.model.checkpoint_files import (
    missing_file,
    read_config,
    read_file_header,
    tensor_twice,
    unreadable_file,
    weight_files,
)
from services.model.packings import logical_headers
from services.model.safetensors_header import LENGTH_BYTES, SafetensorsHeader
from services.model.stored_experts import experts_apart
from services.model.tensor_headers import TensorHeader
from shard_worker.weights.checkpoint import Checkpoint, read_file_ahead
from shard_worker.weights.formats import StoredParts, weight_format
from shard_worker.weights.unread import in_memory
from shard_worker.weights.weight import Weight

_SAMPLES, _SAMPLE_BYTES = 64, 4096


class SafetensorsCheckpoint(Checkpoint):
    """One checkpoint directory."""

    def __init__(self, directory: str | Path, field: str = "--model") -> None:
        """Map the files. field: the option that named the directory, for errors.

        Raises NotFound when the directory, its config.json or a named weight file is missing, InvalidArgument when a
        JSON file is malformed or a tensor is there twice, DataLoss when a weight file is truncated, and what
        `logical_headers` raises.
        """
        directory = Path(directory)
        config = read_config(directory, field)
        self._files = {path: _open(path, field) for path in weight_files(directory, field)}
        self._holder: dict[str, Path] = {}
        self._headers: dict[Path, SafetensorsHeader] = {}
        stored: dict[str, TensorHeader] = {}
        for path, file in self._files.items():
            for name in list(file.keys()):
                if name in stored:
                    raise tensor_twice(name, self._holder[name], path, field)
                view = file.get_slice(name)
                stored[name], self._holder[name] = TensorHeader(view.get_dtype(), tuple(view.get_shape())), path
        _, self._expert_parts = experts_apart(stored)
        super().__init__(directory, config, logical_headers(config, stored, directory))

    def read_ahead(self, names: Iterable[str]) -> None:
        stored: set[str] = set()
        for name in names:
            packed = self.headers[name].packed
            for own in [name] if packed is None else packed.parts.values():
                part = self._expert_parts.get(own)
                stored.add(own if part is None else part.stored)
        for path in {self._holder[name] for name in stored}:
            header = self._headers.get(path) or self._headers.setdefault(path, read_file_header(path))
            entries = [header.tensors[name] for name in stored if self._holder[name] == path]
            start = header.data_start
            read_file_ahead(path, [(start + entry.begin, start + entry.end) for entry in entries])

    def tensor(self, name: str) -> torch.Tensor:
        part = self._expert_parts.get(name)
        if part is None:
            tensor: torch.Tensor = self._files[self._holder[name]].get_tensor(name)
            return tensor
        fused = self._files[self._holder[part.stored]].get_slice(part.stored)
        if part.rows.step is None:
            own: torch.Tensor = fused[part.expert : part.expert + 1, part.rows]
            return own.squeeze(0)
        # Files cannot be sliced in steps.
        whole: torch.Tensor = fused[part.expert : part.expert + 1].squeeze(0)
        whole = whole.t() if part.transposed else whole
        return whole[part.rows].flatten(min(1, whole.dim() - 1)).contiguous()

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        return in_memory(self.unread(name, device, dtype))

    def unread(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        header = self.headers[name]
        assert header.packed is not None
        rows, columns = header.shape
        parts = StoredParts(header.packed, (rows, columns), device, self.tensor, self._holder.__getitem__)
        return weight_format(header.packed.format).load(parts, dtype)

    @functools.cached_property
    def fingerprint(self) -> str:
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


def _open(path: Path, field: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise missing_file(path, field) from None
    except (SafetensorError, OSError) as error:
        raise unreadable_file(path, field, error) from error
