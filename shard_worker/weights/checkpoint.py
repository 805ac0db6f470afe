"""What weights are loaded from, whatever kind of file or directory a user names: the questions that loading asks.

A kind of checkpoint is a subclass; `opening.open_checkpoint` chooses it by the path. It reads; it never writes and
never unpickles.
"""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.model.tensor_headers import TensorHeader
from shard_worker.device.dtypes import dtype_from_name
from shard_worker.weights.weight import DenseWeight, Weight, rows_at_a_time


@dataclass(frozen=True, slots=True)
class MappedRows:
    """A matrix of a checkpoint that is not loaded: its rows are looked up where it is stored. device: the CPU."""

    checkpoint: Checkpoint
    name: str
    device: torch.device = field(default=torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Nothing: pages of the mapped file come and go."""
        return 0

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows as `Checkpoint.rows` does, for indices int64 [n] on the CPU."""
        return self.checkpoint.rows(self.name, indices.tolist())


def read_file_ahead(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Have the system read ranges of a file, from a byte to before another, without waiting for it.

    What cannot be read so is read when it is needed, and its error is told then.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    with contextlib.suppress(OSError), path.open("rb") as file:
        for begin, end in ranges:
            advise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)


class Checkpoint(abc.ABC):
    """A model's or draft's configuration and tensors, which are read when they are asked for.

    directory: where it lies, named in errors. config: its configuration in Hugging Face's words. headers: its tensors
    by Hugging Face's names, packed matrices among them, as `services.model.checkpoint_files.read_headers` gives them to
    the planner. What a kind must add is abstract here.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> None:
        self.directory, self.config, self.headers = directory, config, headers
        self._looked_up: dict[str, Weight] = {}

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash over the configuration, the tensors' headers and samples of their contents.

        It does not depend on path, file times and the split; two trainings of one architecture differ in it, and two
        packings of one model.
        """

    @abc.abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Return a dense tensor over the mapped file, with its stored dtype. Copy it before keeping it."""

    @abc.abstractmethod
    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        """Return a packed matrix on a device, in the form in which it is multiplied by, for activations of a dtype.

        No more than this one matrix is unpacked on the way. Raises DataLoss for contents that its format cannot have.
        """

    def unread(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        """Return a packed matrix as `packed` does, or as one whose rows are read when they are brought to another form
        (`unread.UnreadWeight`); for contents that cannot be, that raises what `packed` raises."""
        return self.packed(name, device, dtype)

    @abc.abstractmethod
    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read what is stored of tensors, while something else is done: they are asked for next."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self.headers[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a dense tensor's stored element type. Raises Unimplemented for one that is not served."""
        return dtype_from_name(self.headers[name].dtype(name))

    def size_bytes(self, name: str) -> int:
        """Return the bytes of a tensor as stored. Raises as `dtype`."""
        return self.headers[name].stored_bytes(name)

    def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of a dense tensor on a device."""
        return self.tensor(name).to(device=device, dtype=dtype, copy=True)

    def parts(self, name: str, device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the rows of a dense matrix on a device, some at a time, in order."""
        matrix = self.tensor(name)
        step = rows_at_a_time(matrix.shape[1], device)
        for first in range(0, len(matrix), step):
            yield matrix[first : first + step].to(device=device, dtype=dtype)

    def weight(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        """Return a matrix for a device, dense or packed as it is stored, for activations of a dtype.

        It is to be `prepared`, or brought to memory as it is by `unread.in_memory`. Raises as `packed`.
        """
        if self.headers[name].packed is not None:
            return self.unread(name, device, dtype)
        return DenseWeight(self.place(name, device, dtype))

    def dense(self, name: str) -> torch.Tensor:
        """Return a matrix [rows, columns] on the CPU for what cuts it by columns.

        A dense one is returned over the mapped file, with its stored dtype, a packed one is unpacked to float32.
        """
        if self.headers[name].packed is None:
            return self.tensor(name)
        weight = self.packed(name, torch.device("cpu"), torch.float32)
        return weight.lookup(torch.arange(weight.rows))

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Return a few rows of a matrix, [len(indices), columns], read from the mapped file.

        A packed matrix is kept packed in the host's memory from then on; only these rows are unpacked, to float32.
        """
        # The matrix is made once: of every tensor or slice that safetensors makes it leaks some bytes, as of its 0.8.0.
        if name not in self._looked_up:
            if self.headers[name].packed is None:
                self._looked_up[name] = DenseWeight(self.tensor(name))
            else:
                self._looked_up[name] = self.packed(name, torch.device("cpu"), torch.float32)
        return self._looked_up[name].lookup(torch.tensor(indices))
