"""Random-weight checkpoints of published shapes, to load and time where the real weights cannot be had.

`python -m tests.reference.big_checkpoints qwen3-8b DIR` writes DIR/target and DIR/draft, bfloat16, in shards. The
numbers are slices of one random buffer: tokens are meaningless, times are not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from coordinator.bench.shapes import TARGETS, draft_config
from services.model.drafts.dflash import read_config, tensor_shapes
from services.model.families import read_model_config
from services.model.target_tensors import target_shapes

SHARD_BYTES = 4 << 30


def write(shape: str, directory: Path) -> None:
    """Write target and draft of a shape that `flashsplit bench step` knows."""
    target = TARGETS[shape]
    _save(directory / "target", target, target_shapes(read_model_config(target)))

    draft = draft_config(shape)
    _save(directory / "draft", draft, tensor_shapes(read_config(draft)))


def _save(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    largest = max(_count(extents) for extents in shapes.values())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    noise = (torch.randn(largest + 4096, device=device) * 0.02).to("cpu", torch.bfloat16)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    pending, number = 0, 0
    for index, (name, extents) in enumerate(shapes.items()):
        start = index % 4096
        shard[name] = noise[start : start + _count(extents)].view(extents).clone()
        pending += shard[name].nbytes
        if pending >= SHARD_BYTES or index == len(shapes) - 1:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, directory / file)
            weight_map |= dict.fromkeys(shard, file)
            shard, pending = {}, 0
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _count(extents: tuple[int, ...]) -> int:
    return torch.Size(extents).numel()


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
