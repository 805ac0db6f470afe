"""Opening what a user named as a model or a draft: what kinds of checkpoints there are, and what decides."""

from __future__ import annotations

from pathlib import Path

from services.model.checkpoint_files import read_config
from services.model.quantization import OPTIONS as QUANTIZE_OPTIONS, Quantization
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.quantized_checkpoint import QuantizedCheckpoint
from shard_worker.weights.random_checkpoint import KEY as RANDOM, RandomCheckpoint
from shard_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(path: str | Path, field: str = "--model", quantization: Quantization | None = None) -> Checkpoint:
    """Return the checkpoint at a path. field: the option that named it, for errors.

    quantization: how its matrices are packed when they are loaded, None for as they are. Its tensors are random where
    its config.json asks for that. Raises what the kinds' classes raise.
    """
    kind = RandomCheckpoint if read_config(path, field).get(RANDOM) is True else SafetensorsCheckpoint
    checkpoint = kind(path, field)
    if quantization is None:
        return checkpoint
    return QuantizedCheckpoint(checkpoint, quantization, QUANTIZE_OPTIONS[field])
