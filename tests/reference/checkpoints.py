"""Writers of tiny random checkpoints: targets of every family, and DFlash drafts.

Shapes and tensor names come from the transformers model classes, values from the seeded
generators of `weights`. Every writer returns the folder it filled.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.reference import storage
from tests.reference.draft_checkpoints import write_draft
from tests.reference.weights import draw_model, generator

__all__ = [
    "random_prompts",
    "write_draft",
    "write_gemma3",
    "write_gemma4",
    "write_glm4_moe",
    "write_gpt_oss",
    "write_laguna",
    "write_llama",
    "write_mistral",
    "write_qwen3",
    "write_qwen3_5",
    "write_qwen3_5_moe",
    "write_qwen3_moe",
    "write_qwen3_next",
]


FULL, SLIDING = "full_attention", "sliding_attention"


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def finish(
    path: Path | str,
    config: Any,
    tensors: dict[str, torch.Tensor],
    eos_token_id: int,
    dtype: str,
    max_shard_size: int | str | None,
) -> Path:
    """Write config, generation config and tensors of a target."""
    folder = Path(path)
    config.save_pretrained(folder)
    generation = {"eos_token_id": [eos_token_id], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    stored = {
        # Published files keep these two in float32 beside bfloat16 projections.
        name: tensor if name.endswith(("A_log", "linear_attn.norm.weight")) else tensor.to(getattr(torch, dtype))
        for name, tensor in tensors.items()
    }
    storage.save_tensors(folder, stored, max_shard_size)
    return folder


def write_qwen3(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    mlp: int = 128,
    vocab: int = 256,
    tied: bool = False,
    dtype: str = "float32",
    max_shard_size: int | str | None = None,
    sliding: int | None = None,
    eos_token_id: int | None = None,
    max_positions: int = 4096,
    rope_theta: float = 10_000.0,
    rope_scaling: dict[str, Any] | None = None,
    legacy_rope: bool = False,
    logit_scale: float = 4.0,
) -> Path:
    """A Qwen3 checkpoint; `sliding` gives the second half of the layers that window."""
    eos = vocab - 1 if eos_token_id is None else eos_token_id
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        use_sliding_window=sliding is not None,
        sliding_window=sliding,
        max_window_layers=layers // 2 if sliding is not None else layers,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})},
        max_position_embeddings=max_positions,
        eos_token_id=eos,
        dtype=dtype,
    )
    with torch.device("meta"):
        shapes = shapes_of(Qwen3ForCausalLM(config))
    tensors = draw_model(shapes, seed=seed, tied=tied, centre=1.0, hidden=hidden, logit_scale=logit_scale)
    folder = finish(path, config, tensors, eos, dtype, max_shard_size)
    if legacy_rope:
        storage.edit_config(folder, flatten_rope)
    return folder


def flatten_rope(config: dict[str, Any]) -> None:
    """The older spelling of the published Qwen3 files: rope_theta at the top level, rope_scaling beside it."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters


def write_llama(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 256,
    tied: bool = False,
    dtype: str = "float32",
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    legacy_rope: bool = False,
) -> Path:
    """A Llama checkpoint. The config names head_dim where it is given."""
    sizes = decoder_sizes(hidden, heads, kv_heads, layers, vocab, tied, dtype)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        head_dim=head_dim,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, **(rope_scaling or {})},
        **sizes,
    )
    folder = write_plain(path, config, LlamaForCausalLM, seed)
    if legacy_rope:
        storage.edit_config(folder, flatten_rope)
    return folder


def write_gemma3(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 4,
    window: int = 6,
    pattern: int = 3,
    scalar: int = 24,
    tied: bool = True,
    cap: float | None = None,
    stretched: bool = False,
    nested: bool = False,
    older: bool = False,
) -> Path:
    """A Gemma 3 checkpoint. pattern: of so many layers the last one is full. stretched: full layers by a factor.
    nested: as the text part of a model with a tower. older: with keys of RoPE and of layers as files had them at
    first."""
    rope = {"rope_type": "linear", "factor": 8.0} if stretched else {"rope_type": "default"}
    text = Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        head_dim=16,
        query_pre_attn_scalar=scalar,
        sliding_window=window,
        layer_types=[SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)],
        rope_parameters={FULL: rope | {"rope_theta": 50_000.0}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        final_logit_softcapping=cap,
        **decoder_sizes(64, 4, 2, layers, 256, tied, "float32"),
    )
    folder = write_plain(path, text, Gemma3ForCausalLM, seed, centre=0.0)
    if older:
        storage.edit_config(folder, lambda config: _to_older_gemma3(config, rope if stretched else None))
    if nested:
        storage.edit_config(folder, lambda config: _nest(config, "gemma3", "Gemma3ForConditionalGeneration"))
        storage.edit_tensors(folder, lambda tensors: _rename(tensors, "model.", "language_model.model."))
        storage.edit_tensors(folder, lambda tensors: tensors.update(tower_tensors(64)))
    return folder


def write_gemma4(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 4,
    window: int = 6,
    tied: bool = True,
    cap: float | None = 8.0,
    keys_as_values: bool = True,
    experts: int = 0,
    sharing: int = 0,
    wide_mlp: bool = False,
    per_layer: int = 0,
    nested: bool = False,
    older: bool = False,
) -> Path:
    """A Gemma 4 checkpoint, of which each second layer is full, with heads twice as wide. experts: how many there are
    beside the dense part. sharing: how many layers share keys and values; wide_mlp: these have dense parts twice as
    wide. per_layer: elements of per-layer embeddings. nested: as the text part of a model with a tower. older: with
    keys of full layers' heads of their own, as in published files."""
    wide = {"global_head_dim": 32, "num_global_key_value_heads": 1 if keys_as_values else None}
    text = Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        head_dim=16,
        **wide,
        attention_k_eq_v=keys_as_values,
        sliding_window=window,
        layer_types=[FULL if layer % 2 else SLIDING for layer in range(layers)],
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=256,
        num_kv_shared_layers=sharing,
        use_double_wide_mlp=wide_mlp,
        enable_moe_block=experts > 0,
        num_experts=experts or None,
        top_k_experts=3 if experts else None,
        moe_intermediate_size=32 if experts else None,
        final_logit_softcapping=cap,
        **decoder_sizes(64, 4, 2, layers, 256, tied, "float32"),
    )
    folder = write_plain(path, text, Gemma4ForCausalLM, seed, fused=True)
    storage.edit_tensors(folder, _temper)
    if older:
        storage.edit_config(folder, lambda config: _to_older_gemma4(config, wide))
    if nested:
        storage.edit_config(folder, lambda config: _nest(config, "gemma4", "Gemma4ForConditionalGeneration"))
        storage.edit_tensors(folder, lambda tensors: _rename(tensors, "model.", "model.language_model."))
        storage.edit_tensors(folder, lambda tensors: tensors.update(tower_tensors(64, "model.")))
    return folder


def _temper(tensors: dict[str, torch.Tensor]) -> None:
    """Divide the weights of queries' norms by the square root of their heads' size, which nothing else divides by."""
    for name in [name for name in tensors if name.endswith("q_norm.weight")]:
        tensors[name] = tensors[name] / len(tensors[name]) ** 0.5


def _to_older_gemma4(config: dict[str, Any], wide: dict[str, Any]) -> None:
    del config["per_layer_config"]
    config |= wide


def _to_older_gemma3(config: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    del config["layer_types"], config["rope_parameters"]
    config |= {
        "sliding_window_pattern": 3,
        "rope_theta": 50_000.0,
        "rope_local_base_freq": 1e4,
        "rope_scaling": scaling,
    }


def _nest(config: dict[str, Any], model_type: str, architecture: str) -> None:
    text = dict(config)
    config.clear()
    config |= {"model_type": model_type, "architectures": [architecture], "text_config": text}
    config |= {"vision_config": {"hidden_size": 32}, "eos_token_id": text["eos_token_id"]}


def _rename(tensors: dict[str, torch.Tensor], before: str, after: str) -> None:
    for name in list(tensors):
        tensors[after + name.removeprefix(before)] = tensors.pop(name)


def tower_tensors(hidden: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a tower and of its way into the text part; a text loader skips them."""
    shapes = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (32, 3, 2, 2),
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": (32, 32),
        "multi_modal_projector.mm_input_projection_weight": (32, hidden),
    }
    return {prefix + name: torch.randn(shape, generator=generator(0, name)) for name, shape in shapes.items()}


def write_mistral(path: Path | str, *, seed: int = 0, sliding: int | None = None, tied: bool = False) -> Path:
    """A Mistral checkpoint; `sliding` gives all layers that window."""
    sizes = decoder_sizes(64, 4, 2, 2, 256, tied, "float32")
    config = MistralConfig(architectures=["MistralForCausalLM"], sliding_window=sliding, head_dim=16, **sizes)
    folder = write_plain(path, config, MistralForCausalLM, seed)
    # What is null is not written, and would be the class's own window when it is read.
    storage.edit_config(folder, lambda config: config.update(sliding_window=sliding))
    return folder


def write_qwen3_moe(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 4,
    experts: int = 8,
    chosen: int = 3,
    tied: bool = False,
    normalised: bool = True,
    dense: Iterable[int] = (),
    step: int = 1,
    sliding: int | None = None,
    dtype: str = "float32",
    hidden: int = 64,
    size: int = 32,
) -> Path:
    """A Qwen3-MoE checkpoint. size: of an expert. dense, step: which layers have no experts, as `mlp_only_layers` and
    `decoder_sparse_step` say. sliding: gives all layers that window."""
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        head_dim=16,
        moe_intermediate_size=size,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=normalised,
        mlp_only_layers=list(dense),
        decoder_sparse_step=step,
        use_sliding_window=sliding is not None,
        sliding_window=sliding,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **decoder_sizes(hidden, 4, 2, layers, 256, tied, dtype),
    )
    return write_plain(path, config, Qwen3MoeForCausalLM, seed)


def apart(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of experts one by one, as most files hold them, in place of all of a layer together."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        start, middle, part = name.rpartition(".experts.")
        if not middle or len(shape) != 3:
            found[name] = shape
            continue
        count, rows, columns = shape
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert in range(count):
            for one in parts:
                found[f"{start}.experts.{expert}.{one}.weight"] = (rows // len(parts), columns)
    return found


def decoder_sizes(
    hidden: int, heads: int, kv_heads: int, layers: int, vocab: int, tied: bool, dtype: str
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "eos_token_id": vocab - 1,
        "dtype": dtype,
    }


def write_gpt_oss(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 4,
    experts: int = 8,
    chosen: int = 3,
    mlp: int = 64,
    sliding: int = 6,
    limit: float = 1.5,
    tied: bool = False,
    biases: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    legacy_rope: bool = False,
    packed: bool = False,
) -> Path:
    """A gpt-oss checkpoint. biases: of attention. limit: of gates, so low that some are cut off. packed: experts in
    MXFP4, as published files have them."""
    given = {} if rope_scaling is None else {"rope_parameters": {"rope_theta": 10_000.0, **rope_scaling}}
    sizes = decoder_sizes(64, 4, 2, layers, 256, tied, "float32") | {"intermediate_size": mlp}
    config = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        head_dim=16,
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        sliding_window=sliding,
        swiglu_limit=limit,
        attention_bias=biases,
        **given,
        **sizes,
    )
    folder = write_plain(path, config, GptOssForCausalLM, seed, fused=True)
    if legacy_rope:
        storage.edit_config(folder, flatten_rope)
    if packed:
        storage.edit_tensors(folder, lambda tensors: pack_experts(tensors, seed))
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        storage.edit_config(folder, lambda config: config.update(quantization_config=settings))
    return folder


def write_glm4_moe(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 3,
    dense: int = 1,
    shared: int = 1,
    normalised: bool = True,
    norms: bool = False,
    biases: bool = False,
    tied: bool = False,
    rotated: float | None = None,
) -> Path:
    """A GLM-4 checkpoint with experts. dense: how many layers have none. shared: experts that are one shared one.
    norms, biases: of attention. rotated: which part of a head is."""
    rope = {} if rotated is None else {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": rotated}}
    config = Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"],
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=shared,
        routed_scaling_factor=1.5,
        first_k_dense_replace=dense,
        norm_topk_prob=normalised,
        use_qk_norm=norms,
        attention_bias=biases,
        **rope,
        **decoder_sizes(64, 4, 2, layers, 256, tied, "float32"),
    )
    return write_plain(path, config, Glm4MoeForCausalLM, seed)


def write_laguna(
    path: Path | str,
    *,
    seed: int = 0,
    heads: Iterable[int] = (4, 6, 4, 2),
    kinds: Iterable[str] = ("full", "sliding", "sliding", "full"),
    dense: Iterable[int] = (0,),
    gating: bool | str = True,
    tied: bool = False,
    biases: bool = False,
    scale: float = 2.5,
    cap: float = 0.0,
    ropes: dict[str, Any] | None = None,
) -> Path:
    """A Laguna checkpoint. heads, kinds: of each layer. dense: layers without experts. biases: of attention. scale,
    cap: of the routers."""
    heads, sizes = list(heads), decoder_sizes(64, 4, 2, len(list(kinds)), 256, tied, "float32")
    config = LagunaConfig(
        architectures=["LagunaForCausalLM"],
        head_dim=16,
        layer_types=[f"{kind}_attention" for kind in kinds],
        mlp_layer_types=["dense" if layer in dense else "sparse" for layer in range(len(heads))],
        num_attention_heads_per_layer=heads,
        sliding_window=6,
        gating=gating,
        attention_bias=biases,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        moe_routed_scaling_factor=scale,
        moe_router_logit_softcapping=cap,
        rope_parameters=ropes,
        **sizes,
    )
    published = {"mlp.gate.e_score": "mlp.experts.e_score", "mlp.shared_experts.": "mlp.shared_expert."}
    return write_plain(path, config, LagunaForCausalLM, seed, published=published)


def pack_experts(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Put random codes and scales of MXFP4 in place of the experts' matrices, which are stored transposed."""
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        gen = generator(seed, name)
        shape = (count, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=gen, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=gen, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}


def hybrid_sizes(key_heads: int, value_heads: int, tied: bool, hidden: int, size: int) -> dict[str, Any]:
    return {
        **decoder_sizes(hidden, 4, 2, 4, 256, tied, "float32"),
        "head_dim": 32,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }


def write_qwen3_5_moe(
    path: Path | str, *, seed: int = 0, value_heads: int = 4, tied: bool = False, hidden: int = 64, size: int = 32
) -> Path:
    """A checkpoint of Qwen3.5 with experts, which stand in one tensor together, as in published files."""
    sizes = hybrid_sizes(2, value_heads, tied, hidden, size)
    rope = sizes["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = Qwen3_5MoeTextConfig(
        architectures=["Qwen3_5MoeForCausalLM"], **sizes | {"rope_parameters": rope}, mamba_ssm_dtype="float32"
    )
    return write_plain(path, config, Qwen3_5MoeForCausalLM, seed, centre=0.0, fused=True)


def write_qwen3_next(
    path: Path | str,
    *,
    seed: int = 0,
    value_heads: int = 4,
    tied: bool = False,
    normalised: bool = True,
    dense: Iterable[int] = (),
    hidden: int = 64,
    size: int = 32,
) -> Path:
    """A Qwen3-Next checkpoint. size: of a routed expert. dense: layers without experts."""
    config = Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        norm_topk_prob=normalised,
        mlp_only_layers=list(dense),
        **hybrid_sizes(2, value_heads, tied, hidden, size),
    )
    return write_plain(path, config, Qwen3NextForCausalLM, seed, centre=0.0)


def write_plain(
    path: Path | str,
    config: Any,
    model: type[torch.nn.Module],
    seed: int,
    *,
    centre: float = 1.0,
    fused: bool = False,
    published: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A checkpoint of the model's own tensors under their own names, experts one by one unless they are `fused`.

    published: parts of names that files have in place of others.
    """
    with torch.device("meta"):
        shapes = shapes_of(model(config))
    shapes = shapes if fused else apart(shapes)
    for own, other in published.items():
        shapes = {name.replace(own, other): shape for name, shape in shapes.items()}
    tied, hidden = config.tie_word_embeddings, config.hidden_size
    tensors = draw_model(shapes, seed=seed, tied=tied, centre=centre, hidden=hidden, logit_scale=4.0)
    dtype = str(config.dtype).removeprefix("torch.")
    return finish(path, config, tensors, config.eos_token_id, dtype, None)


def write_qwen3_5(
    path: Path | str,
    *,
    seed: int = 0,
    layers: int = 8,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    linear_key_heads: int = 2,
    linear_value_heads: int = 4,
    linear_head_dim: int = 16,
    mlp: int = 128,
    vocab: int = 256,
    tied: bool = False,
    nested: bool = False,
    extras: bool = False,
    dtype: str = "float32",
    max_shard_size: int | str | None = None,
    eos_token_id: int | None = None,
    max_positions: int = 4096,
    rope_theta: float = 10_000.0,
    logit_scale: float = 4.0,
) -> Path:
    """A Qwen3.5 checkpoint, text-only or (nested) in the multimodal layout."""
    eos = vocab - 1 if eos_token_id is None else eos_token_id
    rotary_half = head_dim // 8  # a quarter of the head rotates, in pairs
    section = [rotary_half - 2 * (rotary_half // 3), rotary_half // 3, rotary_half // 3]
    text = Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        linear_num_key_heads=linear_key_heads,
        linear_num_value_heads=linear_value_heads,
        linear_key_head_dim=linear_head_dim,
        linear_value_head_dim=linear_head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": section,
        },
        max_position_embeddings=max_positions,
        eos_token_id=eos,
        dtype=dtype,
        full_attention_interval=4,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
    )
    with torch.device("meta"):
        shapes = shapes_of(Qwen3_5ForCausalLM(text))
    tensors = draw_model(shapes, seed=seed, tied=tied, centre=0.0, hidden=hidden, logit_scale=logit_scale)
    config: Any = text
    if nested:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
        config = Qwen3_5Config(
            architectures=["Qwen3_5ForConditionalGeneration"],
            text_config=text.to_dict(),
            vision_config=vision | {"out_hidden_size": hidden},
            tie_word_embeddings=tied,
            dtype=dtype,
        )
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    if extras:
        tensors |= {
            name: torch.randn(shape, generator=generator(seed, name)) for name, shape in junk_shapes(hidden).items()
        }
    return finish(path, config, tensors, eos, dtype, max_shard_size)


def junk_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of published files that serve other purposes; a text loader skips them."""
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.layers.0.input_layernorm.weight": (hidden,),
        "mtp.layers.0.self_attn.q_proj.weight": (2 * hidden, hidden),
        "mtp.layers.0.mlp.down_proj.weight": (hidden, 2 * hidden),
        "model.visual.patch_embed.proj.weight": (32, 3, 2, 16, 16),
        "model.visual.blocks.0.attn.qkv.weight": (96, 32),
        "model.visual.merger.norm.bias": (32,),
    }


def random_prompts(vocab: int, count: int, seed: int, lengths: Iterable[int]) -> list[list[int]]:
    """`count` prompts of random ids below `vocab`; the lengths are used in turn."""
    choices = list(lengths)
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (choices[i % len(choices)],), generator=gen).tolist() for i in range(count)]
