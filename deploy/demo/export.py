"""Writing and reading the two checkpoints: configs, bfloat16 safetensors, small shards."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draft import Draft
from model import Target
from shapes import DraftShape, TargetShape

SHARD_BYTES = 14 * 2**20
LONGEST = 4096
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def write_target(target: Target, folder: Path, turn_end: int, end_of_text: int) -> None:
    shape = target.shape
    full, linear = "full_attention", "linear_attention"
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": shape.full_attention_interval,
        "layer_types": [full if shape.is_full(index) else linear for index in range(shape.num_hidden_layers)],
        "linear_conv_kernel_dim": shape.linear_conv_kernel_dim,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_value_head_dim": shape.linear_head_dim,
        "linear_num_key_heads": shape.linear_num_key_heads,
        "linear_num_value_heads": shape.linear_num_value_heads,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": shape.rms_norm_eps,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
        "bos_token_id": None,
        "dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)
    generation = {"eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text}
    write_json(folder / "generation_config.json", generation | {"do_sample": False})
    write_shards(rounded(target), folder)


def write_draft(draft: Draft, target: TargetShape, folder: Path, mask: int) -> None:
    shape = draft.shape
    keys: dict[str, object] = {"target_layer_ids": list(shape.target_layer_ids), "mask_token_id": mask}
    if shape.selector_rank:
        keys |= {name: getattr(shape, name) for name in DFLASH2_KEYS}
    config = {
        "architectures": ["DFlash2DraftModel" if shape.selector_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": keys,
        "num_target_layers": target.num_hidden_layers,
        "vocab_size": target.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": shape.layer_types,
        "sliding_window": shape.sliding_window,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "is_causal": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)
    save_file(rounded(draft), folder / "model.safetensors", metadata={"format": "pt"})


def rounded(module: nn.Module) -> dict[str, Tensor]:
    """The weights as they are published; everything measured must run on these."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()
    }


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    for stale in folder.glob("model-*.safetensors"):
        stale.unlink()
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    write_json(folder / "model.safetensors.index.json", index)


def read_target(folder: Path) -> Target:
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    shape = TargetShape(
        **{key: config[key] for key in TargetShape.__dataclass_fields__ if key in config},
        linear_head_dim=config["linear_key_head_dim"],
        rotary_dim=int(config["head_dim"] * rope["partial_rotary_factor"]),
        rope_theta=rope["rope_theta"],
    )
    target = Target(shape)
    for file in sorted(folder.glob("model-*.safetensors")):
        missing, unexpected = target.load_state_dict(load_file(file), strict=False)
        if unexpected:
            raise ValueError(f"{file.name} holds unknown tensors: {unexpected}")
    return target.eval()


def read_draft(folder: Path) -> Draft:
    config = json.loads((folder / "config.json").read_text())
    own = config["dflash_config"]
    shape = DraftShape(
        **{key: config[key] for key in DraftShape.__dataclass_fields__ if key in config},
        **{key: own[key] for key in DFLASH2_KEYS if key in own},
        target_layer_ids=tuple(own["target_layer_ids"]),
        sliding_layers=config["layer_types"].count("sliding_attention"),
    )
    draft = Draft(shape)
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.eval()
