"""A checkpoint of which there is a config.json alone: tensors of the shapes that it asks for, of random numbers.

For measuring shapes whose weights are not at hand. What comes out of such a model means nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shard_worker.device.dtypes import dtype_from_name
from shard_worker.drafting.drafters import drafter_of_config
from shard_worker.model.families import family_of
from shard_worker.weights.checkpoint import Checkpoint, read_config

KEY = "random_weights"
"""Of config.json: true asks for random weights in place of files."""

SPREAD = 0.02


def open_checkpoint(directory: str | Path, field: str = "--model") -> Checkpoint:
    """What stands in a directory. Errors as of `Checkpoint`."""
    random = read_config(directory, field).get(KEY) is True
    return RandomCheckpoint(directory, field) if random else Checkpoint(directory, field)


class RandomCheckpoint(Checkpoint):
    """A target or a draft made of noise, wherever it is asked for."""

    def __init__(self, directory: str | Path, field: str = "--model") -> None:
        """Raises InvalidArgument and Unimplemented as reading the configuration does."""
        self.directory = Path(directory)
        self.config = read_config(directory, field)
        self._dtype = dtype_from_name(str(self.config.get("torch_dtype", "bfloat16")), "torch_dtype")
        kind = drafter_of_config(self.config)
        self._shapes = (
            _target_shapes(self.config) if kind is None else kind.expected_shapes(kind.read_config(self.config))
        )
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self.place(name, torch.device("cpu"), self._dtype)

    def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        made = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SPREAD, generator=self._generator(device))
        return made if len(shape) > 1 else made + 1.0

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        generator = self._generator(torch.device("cpu"))
        return torch.empty(len(indices), self._shapes[name][1], dtype=self._dtype).normal_(
            0.0, SPREAD, generator=generator
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:32]

    def size_bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._dtype.itemsize

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(1)
        return self._generators[device]


def _target_shapes(raw: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    _, family, config = family_of(raw)
    shapes = {
        f"model.layers.{layer}.{name}": extents
        for layer in range(config.num_layers)
        for name, extents in family.layer_shapes(config, layer).items()
    }
    matrix = (config.vocab_size, config.hidden_size)
    shapes["model.embed_tokens.weight"] = matrix
    if not config.tied_head:
        shapes["lm_head.weight"] = matrix
    shapes["model.norm.weight"] = (config.hidden_size,)
    return shapes
