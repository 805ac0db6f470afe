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
    """A target or a draft made of noise, wherever it is asked for."""

    def __init__(self, directory: str | Path, field: str = "--model") -> None:
        """Raises InvalidArgument and Unimplemented as reading the configuration does."""
        config = read_config(directory, field)
        dtype = str(config.get("torch_dtype", "bfloat16"))
        self._dtype = dtype_from_name(dtype, "torch_dtype")
        super().__init__(Path(directory), config, random_headers(config))
        self._generators: dict[torch.device, torch.Generator] = {}

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
        tensor = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SPREAD, generator=self._generator(device))
        return tensor if len(shape) > 1 else tensor + 1.0

    def parts(self, name: str, device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        rows, columns = self.shape(name)
        step = rows_at_a_time(columns, device)
        for first in range(0, rows, step):
            part = torch.empty(min(step, rows - first), columns, dtype=dtype, device=device)
            yield part.normal_(0.0, SPREAD, generator=self._generator(device))

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        header = self.headers[name]
        assert header.packed is not None
        rows, columns = header.shape
        return random_packed(header.packed.format.lower(), rows, columns, dtype, device)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        rows = torch.empty(len(indices), self.shape(name)[1], dtype=self._dtype)
        return rows.normal_(0.0, SPREAD, generator=self._generator(torch.device("cpu")))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:32]

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(1)
        return self._generators[device]
