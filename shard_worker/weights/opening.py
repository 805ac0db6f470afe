"""Opening what a user named as a model or a draft: what kinds of checkpoints there are, and what decides."""

from __future__ import annotations

from pathlib import Path

from services.model.checkpoint_files import read_config
from services.model.gguf.container import is_gguf
from services.model.quantization import OPTIONS as QUANTIZE_OPTIONS, Quantization
from services.model.random_weights import is_random
from services.model.rope import with_rope_scaling
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.gguf_checkpoint import GgufCheckpoint
from shard_worker.weights.quantized_checkpoint import QuantizedCheckpoint
from shard_worker.weights.random_checkpoint import RandomCheckpoint
from shard_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(
    path: str | Path,
    field: str = "--model",
    quantization: Quantization | None = None,
    rope_scaling: str | None = None,
) -> Checkpoint:
    """Return the checkpoint at a path. field: the option that named it, for errors.

    A path that ends in .gguf is a GGUF file, any other one a Hugging Face directory, whose tensors are random where its
    config.json asks for that. quantization: how its matrices are packed when they are loaded, None for as they are.
    rope_scaling: what takes the place of the scaling of RoPE in its configuration, as `with_rope_scaling` says. Raises
    what the kinds' classes raise.
    """
    checkpoint = _as_stored(Path(path), field)
    # Its fingerprint is one of the configuration too, so prefixes of another scaling are not taken up.
    checkpoint.config = with_rope_scaling(checkpoint.config, rope_scaling)
    if quantization is None:
        return checkpoint
    return QuantizedCheckpoint(checkpoint, quantization, QUANTIZE_OPTIONS[field])


def _as_stored(path: Path, field: str) -> Checkpoint:
    if is_gguf(path):
        return GgufCheckpoint(path, field)
    if is_random(read_config(path, field)):
        return RandomCheckpoint(path, field)
    return SafetensorsCheckpoint(path, field)
