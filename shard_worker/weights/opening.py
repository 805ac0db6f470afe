"""Opening what a user named as a model or a draft: what kinds of checkpoints there are, and what decides."""

from __future__ import annotations

from pathlib import Path

from services.model.checkpoint_files import read_config
from services.model.gguf.container import is_gguf
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.gguf_checkpoint import GgufCheckpoint
from shard_worker.weights.random_checkpoint import KEY as RANDOM, RandomCheckpoint
from shard_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(path: str | Path, field: str = "--model") -> Checkpoint:
    """Return the checkpoint at a path. field: the option that named it, for errors.

    A path that ends in .gguf is a GGUF file, any other one a Hugging Face directory, whose tensors are random where its
    config.json asks for that. Raises what the kinds' classes raise.
    """
    if is_gguf(Path(path)):
        return GgufCheckpoint(path, field)
    if read_config(path, field).get(RANDOM) is True:
        return RandomCheckpoint(path, field)
    return SafetensorsCheckpoint(path, field)
