"""GGUF files made of checkpoints, as llama.cpp's converter makes them: with its changes, and packed in any type.

Names of tensors and the numbers of packed types are those of the format's own library; the changes and the packing of
K types, which the library cannot do, are stated here once more. Nothing here shares code with the project.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.reference import storage

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, torch.Tensor]
ChooseType = Callable[[str, tuple[int, ...]], str]
"""Gives the type of a tensor by its name in the checkpoint and its shape, in GGUF's words."""

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
}

UNCHANGED = ("qwen3", "qwen3_moe", "gpt_oss", "gemma4_text")
"""Families of whose numbers the converter changes none, once experts are apart."""

HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families with recurrent layers."""

CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
"""How norms of Qwen3.5 end whose weights are centred on 0."""


def all_of(name: str) -> ChooseType:
    """Give all matrices whose rows allow it one type."""
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return lambda stored, shape: name if is_packed(stored, shape) and shape[-1] % block == 0 else "F32"


def is_packed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the format's own tools pack a tensor: matrices, those of experts too, and no routers."""
    return len(shape) > 1 and not name.endswith(
        ("mlp.gate.weight", "mlp.router.weight", "router.proj.weight", "_expert_gate.weight", "conv1d.weight", "bias")
    )


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """Give the types of the usual mix."""
    if not is_packed(name, shape) or shape[-1] % 256:
        return "Q8_0" if is_packed(name, shape) and shape[-1] % 32 == 0 else "F32"
    return "Q6_K" if name.endswith(("lm_head.weight", "v_proj.weight", "down_proj.weight")) else "Q4_K"


def mxfp4_experts(name: str, shape: tuple[int, ...]) -> str:
    """Give the types of gpt-oss as it is published."""
    if ".experts." in name and is_packed(name, shape):
        return "MXFP4"
    return "BF16" if is_packed(name, shape) else "F32"


def write_gguf(
    checkpoint: Path,
    path: Path,
    choose: ChooseType,
    dense: Path | None = None,
    split_max_tensors: int = 0,
    joined: bool = False,
) -> Path:
    """Write a checkpoint of one of `ARCHITECTURES` to a GGUF file.

    dense: where a checkpoint is written to whose tensors are the numbers that the packed ones stand for, if anywhere.
    joined: whether experts' gates and ups are one tensor, and projections of Qwen3-Next are left as they are.
    """
    config = storage.read_config(checkpoint)
    text = config.get("text_config", config)
    family = text["model_type"].removesuffix("_text")
    hybrid, architecture = family in HYBRID, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_max_tensors)
    add_shape(writer, text, hybrid)
    if (checkpoint / "tokenizer.json").exists():
        add_tokenizer(writer, checkpoint, text["vocab_size"])
    if text.get("eos_token_id") is not None:
        writer.add_eos_token_id(text["eos_token_id"])
    names = gguf.get_tensor_name_map(architecture, text["num_hidden_layers"] + 1)
    meant: dict[str, torch.Tensor] = {}
    tensors = experts_together(storage.load_tensors(checkpoint), joined, alternating=family == "gpt_oss")
    for stored, tensor in (tensors if joined else ungrouped(tensors, text)).items():
        name = stored.replace("language_model.", "")
        if name.startswith(("mtp.", "model.visual.")) or (name == "lm_head.weight" and text["tie_word_embeddings"]):
            continue
        numbers = tensor.float().numpy()
        changed = convert(name, numbers, text)
        kind = choose(name, changed.shape)
        whole = whole_scales(changed) if kind == "NVFP4" else None
        packed = pack(changed if whole is None else changed / whole, kind)
        target = stored_name(name, names)
        assert target is not None, name
        writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        flat = packed.reshape(-1, packed.shape[-1]).view(np.uint8)
        values = gguf.dequantize(flat, gguf.GGMLQuantizationType[kind]).reshape(changed.shape)
        if whole is not None:
            values = values * whole
            for end, scales in (("scale", whole), ("input_scale", np.full_like(whole, 7))):
                writer.add_tensor(target.replace("weight", end), scales.reshape(-1))
        undone = restore(name, values, text)
        meant[name] = torch.from_numpy(np.ascontiguousarray(undone.reshape(numbers.shape)))
    if hybrid:
        # The block that guesses further tokens stands behind the model's own.
        writer.add_tensor(f"blk.{text['num_hidden_layers']}.attn_norm.weight", np.ones(4, dtype=np.float32))
    scaling = text["rope_parameters"]
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(scaling, text["head_dim"]))
    if family == "gemma4":
        writer.add_tensor("rope_freqs.weight", proportional_divisors(text))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dense is not None:
        dense.mkdir()
        storage.write_config(dense, text | {"dtype": "float32", "torch_dtype": "float32"})
        fused = family in ("qwen3_5_moe", "gpt_oss", "gemma4")
        meant = experts_apart(meant, fused=fused, alternating=family == "gpt_oss")
        storage.save_tensors(dense, meant if joined else grouped(meant, text))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (checkpoint / name).exists():
                (dense / name).write_bytes((checkpoint / name).read_bytes())
    return path


def stored_name(name: str, names: gguf.TensorNameMap) -> str | None:
    """Return what the converter calls a tensor, None for one that it does not know."""
    layer, found, part = name.partition(".router.")
    if found and part != "proj.weight" and layer.count(".") == 2:
        return f"blk.{layer.rpartition('.')[2]}.{'ffn_gate_inp' if part == 'scale' else 'ffn_down_exps'}.scale"
    known = name.replace(".dt_bias", ".dt_proj.bias")
    known += ".weight" if name.endswith(("self_attn.sinks", "layer_scalar")) else ""
    target: str | None = names.get_name(known, try_suffixes=(".weight", ".bias"))
    return target


def add_shape(writer: gguf.GGUFWriter, text: dict[str, Any], hybrid: bool) -> None:
    """Add what config.json says of the shape."""
    layers, head_dim = text["num_hidden_layers"], text["head_dim"]
    rope = text.get("rope_parameters") or text
    writer.add_name("Tiny")
    writer.add_block_count(layers + hybrid)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    experts = text.get("num_experts", text.get("num_local_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(text.get("num_experts_per_tok", text.get("top_k_experts")))
        writer.add_expert_feed_forward_length(text.get("moe_intermediate_size", text["intermediate_size"]))
        if "shared_expert_intermediate_size" in text:
            writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    if "intermediate_size" in text and not text.get("use_double_wide_mlp"):
        writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    if text["model_type"] == "gemma4_text":
        add_gemma4(writer, text)
    else:
        writer.add_head_count_kv(text["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if text["model_type"] in ("gemma3_text", "gemma4_text", "gpt_oss"):
        writer.add_sliding_window(text["sliding_window"])
    if text.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(text["final_logit_softcapping"])
    if hybrid:
        writer.add_rope_dimension_count(int(head_dim * 0.25))
        if "mrope_section" in rope:
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_full_attention_interval(text["layer_types"].index("full_attention") + 1)
        writer.add_nextn_predict_layers(1)
        writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(text["linear_key_head_dim"])
        writer.add_ssm_group_count(text["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
        writer.add_ssm_inner_size(text["linear_value_head_dim"] * text["linear_num_value_heads"])


def add_gemma4(writer: gguf.GGUFWriter, text: dict[str, Any]) -> None:
    """Add what Gemma 4 says of its two kinds of layers, of layers that share, and of per-layer embeddings."""
    sliding = [kind == "sliding_attention" for kind in text["layer_types"]]
    wide, narrow, layers = text["global_head_dim"], text["head_dim"], text["num_hidden_layers"]
    shared, kv_heads = text["num_kv_shared_layers"], text["num_key_value_heads"]
    full_kv_heads = text["num_global_key_value_heads"]
    writer.add_sliding_window_pattern(sliding)
    writer.add_head_count_kv(
        kv_heads if full_kv_heads is None else [kv_heads if one else full_kv_heads for one in sliding]
    )
    for add, size in (
        (writer.add_key_length, wide),
        (writer.add_value_length, wide),
        (writer.add_key_length_swa, narrow),
        (writer.add_value_length_swa, narrow),
    ):
        add(size)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(text["hidden_size_per_layer_input"])
    writer.add_rope_freq_base_swa(text["rope_parameters"]["sliding_attention"]["rope_theta"])
    if text["use_double_wide_mlp"]:
        inner = text["intermediate_size"]
        writer.add_feed_forward_length([inner if layer < layers - shared else 2 * inner for layer in range(layers)])


def proportional_divisors(text: dict[str, Any]) -> Array:
    """Return what Gemma 4's frequencies are divided by in full layers, so that some pairs turn alone."""
    pairs = text["global_head_dim"] // 2
    turning = int(pairs * text["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.array([1.0] * turning + [1e30] * (pairs - turning), dtype=np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int, pre: str = "starcoder") -> None:
    """Add a tokenizer of byte-level BPE, and the chat template; ids that it lacks are tokens that are not in use."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    by_id = {token_id: token for token, token_id in vocab.items()}
    special = {token["id"]: token["special"] for token in tokenizer["added_tokens"]}
    types = gguf.TokenType
    size = max(vocab_size, max(by_id) + 1)
    kinds = [
        (types.CONTROL if special[i] else types.USER_DEFINED)
        if i in special
        else types.NORMAL
        if i in by_id
        else types.UNUSED
        for i in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges)
    settings_path = checkpoint / "tokenizer_config.json"
    if settings_path.exists():
        settings = json.loads(settings_path.read_text())
        if settings.get("chat_template"):
            writer.add_chat_template(settings["chat_template"])


def llama3_divisors(scaling: dict[str, Any], head_dim: int) -> Array:
    """Return what Llama 3's RoPE divides each frequency by, as the converter works it out."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * scaling["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def llama_heads(name: str, text: dict[str, Any]) -> int | None:
    """Return how many heads' rows the converter of Llama interleaves; None for other tensors."""
    if ".q_proj." in name:
        return int(text["num_attention_heads"])
    return int(text["num_key_value_heads"]) if ".k_proj." in name else None


def convert(name: str, weight: Array, text: dict[str, Any]) -> Array:
    """Return a tensor as the converter changes it."""
    if text["model_type"] in UNCHANGED:
        return weight
    if text["model_type"] == "gemma3_text":
        return weight + np.float32(1) if name.endswith("norm.weight") else weight
    if text["model_type"] == "llama":
        heads = llama_heads(name, text)
        if heads is None:
            return weight
        return weight.reshape(heads, 2, -1, weight[0].size).swapaxes(1, 2).reshape(weight.shape)
    if name.endswith(CENTRED) and ".linear_attn." not in name:
        return weight + np.float32(1)
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if name.endswith("conv1d.weight"):
        weight = weight.squeeze(1)
    if name.endswith("shared_expert_gate.weight"):
        weight = weight.squeeze(0)
    order = tiled_order(name, text)
    if order is not None and name.endswith("out_proj.weight"):
        return np.ascontiguousarray(weight[:, order])
    return weight if order is None else weight[order]


def restore(name: str, weight: Array, text: dict[str, Any]) -> Array:
    """Return a tensor as it was before `convert`."""
    if text["model_type"] in UNCHANGED:
        return weight
    if text["model_type"] == "gemma3_text":
        return weight - np.float32(1) if name.endswith("norm.weight") else weight
    if text["model_type"] == "llama":
        heads = llama_heads(name, text)
        return weight if heads is None else weight.reshape(heads, -1, 2, weight[0].size).swapaxes(1, 2)
    if name.endswith(CENTRED) and ".linear_attn." not in name:
        return weight - np.float32(1)
    if name.endswith("A_log"):
        weight = np.log(-weight)
    order = tiled_order(name, text)
    if order is None:
        return weight
    restored = np.empty_like(weight)
    if name.endswith("out_proj.weight"):
        restored[:, order] = weight
    else:
        restored[order] = weight
    return restored


def tiled_order(name: str, text: dict[str, Any]) -> Array | None:
    """Return which row (or column) of a tensor stands at each place once value heads are tiled; None for others."""
    if text["model_type"] == "qwen3_next":
        return None
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    width, first = text["linear_value_head_dim"], 2 * keys * text["linear_key_head_dim"]
    # Head `turn` of every key head in turn: key head 0's, key head 1's, ...
    heads = np.array([key * (values // keys) + turn for turn in range(values // keys) for key in range(keys)])
    elements = (heads[:, None] * width + np.arange(width)).reshape(-1)
    leaf = name.partition("linear_attn.")[2]
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([np.arange(first), first + elements])
    if leaf in ("in_proj_z.weight", "out_proj.weight"):
        return elements
    if leaf in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"):
        return heads
    return None


def ungrouped(tensors: Tensors, text: dict[str, Any]) -> Tensors:
    """Return the tensors with queries, keys and values in one matrix and gates in another, as of Qwen3.5, where a
    checkpoint of Qwen3-Next has those of each key head together."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        start, grouped, _ = name.partition("in_proj_qkvz.weight")
        if not grouped:
            found[name] = tensor
            continue
        keys, (key, value) = text["linear_num_key_heads"], grouped_sizes(text)
        parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split([key, key, value, value], 1)]
        found[f"{start}in_proj_qkv.weight"], found[f"{start}in_proj_z.weight"] = torch.cat(parts[:3]), parts[3]
    return found


def grouped(tensors: Tensors, text: dict[str, Any]) -> Tensors:
    """Return the tensors as they were before `ungrouped`."""
    if text["model_type"] != "qwen3_next":
        return tensors
    found = dict(tensors)
    keys, (key, value) = text["linear_num_key_heads"], grouped_sizes(text)
    for name in tensors:
        start, qkv, _ = name.partition("in_proj_qkv.weight")
        if qkv:
            whole = torch.cat([found.pop(name), found.pop(f"{start}in_proj_z.weight")])
            parts = whole.split([keys * key, keys * key, keys * value, keys * value])
            heads = torch.cat([part.unflatten(0, (keys, -1)) for part in parts], 1)
            found[f"{start}in_proj_qkvz.weight"] = heads.flatten(0, 1)
    return found


def grouped_sizes(text: dict[str, Any]) -> tuple[int, int]:
    """Return the rows of a key head's keys, and of its value heads' values."""
    share = text["linear_num_value_heads"] // text["linear_num_key_heads"]
    return text["linear_key_head_dim"], share * text["linear_value_head_dim"]


PARTS = ("gate_proj", "up_proj", "down_proj")


def experts_together(tensors: Tensors, joined: bool, alternating: bool = False) -> Tensors:
    """Return the tensors with one [experts, rows, columns] for each part of all experts of a layer, whether they were
    one by one or had gates and ups in one tensor. joined: whether these have one then. alternating: whether the rows of
    both alternate, in matrices that are transposed, beside biases."""
    if alternating:
        return turned_experts(tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        start, middle, leaf = name.partition(".experts.")
        if not middle:
            found[name] = tensor
        elif leaf == "gate_up_proj":
            for part, half in zip(PARTS, tensor.chunk(2, 1), strict=False):
                found[f"{start}.experts.{part}.weight"] = half
        elif leaf == "down_proj":
            found[f"{name}.weight"] = tensor
        elif leaf.startswith("0."):
            part = leaf.split(".")[1]
            count = sum(other.startswith(f"{start}.experts.") for other in tensors) // len(PARTS)
            own = [tensors[f"{start}.experts.{expert}.{part}.weight"] for expert in range(count)]
            found[f"{start}.experts.{part}.weight"] = torch.stack(own)
    for name in [name for name in found if joined and name.endswith(".experts.gate_proj.weight")]:
        start = name.removesuffix("gate_proj.weight")
        halves = [found.pop(f"{start}{part}.weight") for part in PARTS[:2]]
        found[f"{start}gate_up_proj.weight"] = torch.cat(halves, 1)
    return found


def turned_experts(tensors: Tensors) -> Tensors:
    """Return the tensors of gpt-oss with gates and ups apart, [experts, rows, columns], and the biases of each."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        start, middle, leaf = name.partition(".experts.")
        if not middle:
            found[name] = tensor
            continue
        projection, biases, _ = leaf.partition("_bias")
        end, rows = ("bias", tensor) if biases else ("weight", tensor.transpose(1, 2))
        if projection == "down_proj":
            found[f"{start}.experts.down_proj.{end}"] = rows.contiguous()
        else:
            for half, part in enumerate(PARTS[:2]):
                found[f"{start}.experts.{part}.{end}"] = rows[:, half::2].contiguous()
    return found


def turned_back(tensors: Tensors) -> Tensors:
    """Return the tensors as they were before `turned_experts`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        start, middle, leaf = name.partition(".experts.")
        part, _, end = leaf.partition(".")
        if not middle:
            found[name] = tensor
        elif part != "up_proj":
            rows, stem = tensor, "down_proj"
            if part == "gate_proj":
                rows = torch.stack([tensor, tensors[f"{start}.experts.up_proj.{end}"]], 2).flatten(1, 2)
                stem = "gate_up_proj"
            own = f"{stem}_bias" if end == "bias" else stem
            found[f"{start}.experts.{own}"] = rows if end == "bias" else rows.transpose(1, 2).contiguous()
    return found


def experts_apart(tensors: Tensors, fused: bool, alternating: bool = False) -> Tensors:
    """Return the tensors as they were before `experts_together`. fused: whether experts were not one by one."""
    if alternating:
        return turned_back(tensors)
    found: Tensors = {}
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj.weight")]:
        start, halves = name.removesuffix("gate_up_proj.weight"), tensors[name].chunk(2, 1)
        parts = {f"{start}{part}.weight": half for part, half in zip(PARTS, halves, strict=False)}
        tensors = {other: tensor for other, tensor in tensors.items() if other != name} | parts
    for name, tensor in tensors.items():
        start, middle, leaf = name.partition(".experts.")
        if not middle:
            found[name] = tensor
        elif not fused:
            found |= {f"{start}.experts.{expert}.{leaf}": own.clone() for expert, own in enumerate(tensor)}
        elif leaf == "gate_proj.weight":
            gate_up = torch.cat([tensor, tensors[f"{start}.experts.up_proj.weight"]], 1)
            found[f"{start}.experts.gate_up_proj"] = gate_up
        elif leaf == "down_proj.weight":
            found[f"{start}.experts.down_proj"] = tensor
    return found


def pack(weight: Array, kind: str) -> Array:
    """Return a tensor in a type, as the library's writer takes it."""
    if kind == "F32":
        return np.ascontiguousarray(weight)
    if kind == "F16":
        return weight.astype(np.float16)
    packers: dict[str, Callable[[Array], Array]] = {"Q4_K": pack_q4_k, "Q5_K": pack_q5_k, "Q6_K": pack_q6_k}
    if kind == "NVFP4":
        return pack_nvfp4(weight.reshape(-1, 64)).reshape(*weight.shape[:-1], -1)
    if kind in packers:
        packed = packers[kind](weight.reshape(-1, 256))
        return packed.reshape(*weight.shape[:-1], -1)
    packed_by_library: Array = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    return packed_by_library


def whole_scales(weight: Array) -> Array:
    """Return what ModelOpt has NVFP4's scales of a matrix multiplied by, float32 with the extents of a tensor of many
    experts, or of a matrix."""
    largest: Array = np.abs(weight).max((-2, -1), keepdims=True) / (6 * 448)
    return largest.astype(np.float32)


def pack_nvfp4(blocks: Array) -> Array:
    """Pack blocks of 64: scales of 16 values each, then of these the codes of the first 8 in low halves."""
    groups = blocks.reshape(-1, 4, 16)
    scales = torch.from_numpy(np.abs(groups).max(-1) / 6).to(torch.float8_e4m3fn)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
    steps = divided(groups, scales.float().numpy()[..., None])
    codes = np.abs(steps[..., None] - table).argmin(-1).astype(np.uint8)
    held = (codes[..., :8] | codes[..., 8:] << 4).reshape(-1, 32)
    return np.concatenate([scales.view(torch.uint8).numpy(), held], 1)


def divided(numbers: Array, by: Array) -> Array:
    """Return the quotient, 0 where the divisor is 0."""
    return np.divide(numbers, by, out=np.zeros(np.broadcast_shapes(numbers.shape, by.shape), np.float32), where=by != 0)


def pack_affine(blocks: Array, levels: int) -> tuple[Array, Array]:
    """Return the first 16 bytes of blocks of Q4_K and Q5_K, and the codes [n, 8, 32]."""
    groups = blocks.reshape(-1, 8, 32)
    offsets = np.maximum(-groups.min(-1), 0)
    scales = (groups.max(-1) + offsets) / levels
    d, dmin = (numbers.max(-1, keepdims=True).astype(np.float32) / 63 for numbers in (scales, offsets))
    d, dmin = d.astype(np.float16), dmin.astype(np.float16)
    small = np.clip(np.rint(divided(scales, d.astype(np.float32))), 0, 63).astype(np.uint8)
    least = np.clip(np.rint(divided(offsets, dmin.astype(np.float32))), 0, 63).astype(np.uint8)
    steps = (d.astype(np.float32) * small)[..., None]
    codes = np.clip(np.rint(divided(groups + (dmin.astype(np.float32) * least)[..., None], steps)), 0, levels)
    packed = np.concatenate(
        [
            small[:, :4] | (small[:, 4:] >> 4) << 6,
            least[:, :4] | (least[:, 4:] >> 4) << 6,
            (small[:, 4:] & 15) | (least[:, 4:] & 15) << 4,
        ],
        1,
    )
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed], 1), codes.astype(np.uint8)


def pack_q4_k(blocks: Array) -> Array:
    head, codes = pack_affine(blocks, 15)
    return np.concatenate([head, (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 128)], 1)


def pack_q5_k(blocks: Array) -> Array:
    head, codes = pack_affine(blocks, 31)
    high = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    low = codes & 15
    return np.concatenate([head, high, (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)], 1)


def pack_q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(-1) / 31
    d = (scales.max(-1, keepdims=True) / 127).astype(np.float16)
    small = np.clip(np.rint(divided(scales, d.astype(np.float32))), 0, 127).astype(np.int8)
    steps = (d.astype(np.float32) * small)[..., None]
    codes = (np.clip(np.rint(divided(groups, steps)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4], 1).reshape(-1, 128)
    high = np.bitwise_or.reduce((codes >> 4) << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=2).reshape(-1, 64)
    return np.concatenate([low, high, small.view(np.uint8), d.view(np.uint8)], 1)
