"""Safetensors files of a checkpoint folder: writing with or without shards, reading, editing.

The edit helpers let a loader test damage a checkpoint (drop a tensor, change a config key)
without knowing how the folder is laid out.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNITS = {"KB": 10**3, "MB": 10**6, "KiB": 2**10, "MiB": 2**20}


def byte_count(size: int | str) -> int:
    """Bytes in a size given as a number or as text such as "40KB"."""
    if isinstance(size, int):
        return size
    for unit, factor in UNITS.items():
        if size.endswith(unit):
            return int(float(size.removesuffix(unit)) * factor)
    return int(size)


def split_shards(tensors: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Fill shards in order; a tensor above the limit gets a shard of its own."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], max_shard_size: int | str | None = None) -> None:
    """Write one file, or numbered shards with the usual index when a limit is given."""
    if max_shard_size is None:
        save_file(tensors, path / SINGLE, metadata={"format": "pt"})
        return
    shards = split_shards(tensors, byte_count(max_shard_size))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2))


def load_tensors(path: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, whatever its sharding."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def read_config(path: Path | str) -> dict[str, Any]:
    """The config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return config


def write_config(path: Path | str, config: dict[str, Any]) -> None:
    """Replace the config.json of a checkpoint folder."""
    (Path(path) / "config.json").write_text(json.dumps(config, indent=2))


def edit_config(path: Path | str, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply an in-place change to config.json."""
    config = read_config(path)
    change(config)
    write_config(path, config)


def edit_tensors(path: Path | str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Apply an in-place change to the tensors; the result is one unsharded file."""
    folder = Path(path)
    tensors = load_tensors(folder)
    change(tensors)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    save_tensors(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})
