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

from shard_worker.draft_config import read_draft_config
from shard_worker.drafters.dflash import expected_shapes
from shard_worker.families import family_of

SHARD_BYTES = 4 << 30

_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
_TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "qwen3.6-27b": _COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}
_DRAFTS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"target_layer_ids": [1, 7, 13, 19, 25], "mask_token_id": 151669},
    "qwen3-8b": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
    "qwen3.6-27b": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070},
}


def write(shape: str, directory: Path) -> None:
    """Write target and draft of a shape ("qwen3-0.6b", "qwen3-8b", "qwen3.6-27b")."""
    target = _TARGETS[shape]
    _, family, config = family_of(target)
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
    _save(directory / "target", target, shapes)

    sliding = shape == "qwen3.6-27b"
    draft = _COMMON | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 40960,
        "rope_theta": config.rope_theta,
        "block_size": 16,
        "num_target_layers": config.num_layers,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "is_causal": False,
        "dflash_config": _DRAFTS[shape],
    }
    _save(directory / "draft", draft, expected_shapes(read_draft_config(draft)))


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
