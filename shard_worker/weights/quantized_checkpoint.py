"""A checkpoint of 16 or 32 bits whose matrices are packed while they are loaded (`--quantize`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

from services.model.quantization import Quantization
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.quantize import quantize
from shard_worker.weights.weight import Weight


class QuantizedCheckpoint(Checkpoint):
    """Gives what another checkpoint gives, some of its matrices packed."""

    def __init__(self, dense: Checkpoint, quantization: Quantization, field: str) -> None:
        """field: the option that asks for it, for the error.

        Raises InvalidArgument for a checkpoint with a matrix that is packed already.
        """
        super().__init__(dense.directory, dense.config, quantization.headers(dense.headers, dense.directory, field))
        self._dense, self._quantization = dense, quantization

    @functools.cached_property
    def fingerprint(self) -> str:
        return self._quantization.fingerprint(self._dense.fingerprint)

    def read_ahead(self, names: Iterable[str]) -> None:
        self._dense.read_ahead(names)

    def tensor(self, name: str) -> torch.Tensor:
        return self._dense.tensor(name)

    def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self._dense.place(name, device, dtype)

    def parts(self, name: str, device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        return self._dense.parts(name, device, dtype)

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        header = self.headers[name]
        assert header.packed is not None
        rows, columns = header.shape
        parts = self.parts(name, device, self.dtype(name))
        return quantize(parts, self._quantization.to, (rows, columns), header.packed.group, dtype)

    def dtype(self, name: str) -> torch.dtype:
        return self._dense.dtype(name)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """As `Checkpoint.rows`; of a matrix that is to be packed these rows alone are."""
        rows, packed = self._dense.rows(name, indices), self.headers[name].packed
        if packed is None:
            return rows
        shape = (len(indices), self.shape(name)[1])
        return quantize([rows], self._quantization.to, shape, packed.group, torch.float32).unpacked()
