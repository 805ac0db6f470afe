"""A checkpoint of which there is a config.json alone: tensors of the shapes that it asks for, of random numbers.

It serves to measure shapes whose weights are not at hand. What comes out of such a model means nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from services.model.checkpoint_files import read_config
from services.model.drafts.dflash import TOKEN_OFFSETS
from services.model.random_weights import random_headers
from shard_worker.device.dtypes import dtype_from_name
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.random_packed import random_packed
from shard_worker.weights.weight import Weight, rows_at_a_time

SPREAD = 0.02
"""Standard deviation of the numbers; those of vectors have the mean 1."""


class RandomCheckpoint(Checkpoint):
    """A target or a draft made of noise, wherever it is asked for.

    On one kind of device a tensor has the same numbers each time, so that another worker takes a lost one's place
    with the same tokens, whatever else it holds.
    """

    def __init__(self, directory: str | Path, field: str = "--model") -> None:
        """Raises InvalidArgument and Unimplemented as reading the configuration does."""
        config = read_config(directory, field)
        dtype = str(config.get("torch_dtype", "bfloat16"))
        self._dtype = dtype_from_name(dtype, "torch_dtype")
        super().__init__(Path(directory), config, random_headers(config))
        self._row_sources: dict[str, torch.Tensor] = {}
        """The tensors of which rows were looked up, as files would have them."""

    def read_ahead(self, names: Iterable[str]) -> None:
        """As `Checkpoint.read_ahead`: there is nothing to read."""

    def tensor(self, name: str) -> torch.Tensor:
        if name == TOKEN_OFFSETS:
            # A draft's tokens are as far apart among the target's as they can be.
            count = self.shape(name)[0]
            rows = torch.arange(count)
            return rows * self.config["vocab_size"] // count - rows
        return self.place(name, torch.device("cpu"), self._dtype)

    def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) != 2:
            tensor = torch.empty(shape, dtype=self._dtype, device=device)
            tensor.normal_(0.0, SPREAD, generator=_generator(device, name))
            return (tensor if len(shape) > 1 else tensor + 1.0).to(dtype)
        tensor, first = torch.empty(shape, dtype=dtype, device=device), 0
        # In parts as well: what numbers come depends on how many are asked for at a time.
        for part in self.parts(name, device, dtype):
            tensor[first : first + len(part)] = part
            first += len(part)
        return tensor

    def parts(self, name: str, device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        rows, columns = self.shape(name)
        step, generator = rows_at_a_time(columns, device), _generator(device, name)
        for first in range(0, rows, step):
            part = torch.empty(min(step, rows - first), columns, dtype=self._dtype, device=device)
            yield part.normal_(0.0, SPREAD, generator=generator).to(dtype)

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        header = self.headers[name]
        assert header.packed is not None
        rows, columns = header.shape
        return random_packed(header.packed.format.lower(), rows, columns, dtype, device)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        if name not in self._row_sources:
            self._row_sources[name] = self.tensor(name)
        return self._row_sources[name][list(indices)]

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:32]


def _generator(device: torch.device, name: str) -> torch.Generator:
    """Return what makes the numbers of a tensor of this name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return torch.Generator(device).manual_seed(seed)
