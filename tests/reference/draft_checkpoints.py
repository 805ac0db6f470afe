"""Writer of tiny random DFlash drafts in the config spellings found in published drafts.

"zlab" is the plain form, "nested" moves block size and causality into `dflash_config`,
"rope_parameters" uses the newer rope key, and "speculators" is that library's layout, whose
layer ids count the input of a block and are therefore one higher.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.reference import storage
from tests.reference.weights import draw

DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
"""DFlash2's own keys, for a tiny draft."""

DSPARK = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": True,
}
"""DSpark's own keys, for a tiny draft that never cuts its blocks."""

DOMINO = {
    "projector_type": "domino",
    "gru_hidden_dim": 12,
    "emb_dim": 10,
    "pure_draft_prefix_len": 1,
    "shift_label": True,
}
"""Domino's own keys, for a tiny draft."""

FORMS = ("zlab", "nested", "rope_parameters", "speculators")


def draft_shapes(
    hidden: int,
    captures: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    attention_bias: bool,
    vocab: int,
    head_rows: int,
    own: Mapping[str, Any],
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a draft without an embedding or head of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, captures * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    projections = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    for layer in range(layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = shape
            if attention_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
        shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (mlp, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, mlp)
        if "conv_kernel_size" in own:
            taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"{prefix}{part}.base_kernel"] = (2, taps, hidden)
                shapes[f"{prefix}{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if "selector_rank" in own:
        rank = own["selector_rank"]
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        shapes["candidate_selector.predecessor_codebook"] = (vocab, rank)
        shapes["candidate_selector.successor_codebook"] = (vocab, rank)
    if "markov_rank" in own:
        rank = own["markov_rank"]
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (head_rows, rank)
        if own["markov_head_type"] == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if own["markov_head_type"] == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if own["enable_confidence_head"]:
            columns = hidden + (rank if own["confidence_head_with_markov"] else 0)
            shapes["confidence_head.proj.weight"] = (1, columns)
            shapes["confidence_head.proj.bias"] = (1,)
    if "gru_hidden_dim" in own:
        state = own["gru_hidden_dim"]
        shapes["prefix_gru.weight_ih_l0"] = (3 * state, hidden)
        shapes["prefix_gru.weight_hh_l0"] = (3 * state, state)
        shapes["embed_proj.0.weight"] = (own["emb_dim"], hidden + state)
        shapes["embed_proj.2.weight"] = (head_rows, own["emb_dim"])
    return shapes


def speculators_config(
    decoder: dict[str, Any],
    target: dict[str, Any],
    target_path: Path,
    ids: Sequence[int],
    mask: int,
    block_size: int,
    is_causal: bool | None,
    draft_vocab_size: int,
) -> dict[str, Any]:
    """The speculators layout; only the causality of sliding layers can be expressed in it."""
    if is_causal:
        raise ValueError("the speculators layout cannot make full-attention layers causal")
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block_size - 1}],
            "verifier": {
                "name_or_path": str(target_path),
                "architectures": target["architectures"],
            },
        },
        "transformer_layer_config": decoder,
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "block_size": block_size,
        "mask_token_id": mask,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": decoder["hidden_size"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": is_causal is False,
    }


def zlab_config(
    decoder: dict[str, Any],
    ids: Sequence[int],
    mask: int,
    block_size: int,
    is_causal: bool | None,
    target_layers: int,
    nested: bool,
) -> dict[str, Any]:
    """The z-lab layout, with the disputed keys at the top level or in `dflash_config`."""
    config = decoder | {
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(ids)},
    }
    place = config["dflash_config"] if nested else config
    place["block_size"] = block_size
    if is_causal is not None:
        place["causal" if nested else "is_causal"] = is_causal
    return config


def of_layout(config: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A DFlash draft's config as that of another layout, told by its own keys; DSpark's stand at the top level."""
    name = "dflash2" if "selector_rank" in own else "dspark" if "markov_rank" in own else "domino"
    architecture = {"dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel", "domino": "DominoDraftModel"}[name]
    config = {**config, "architectures": [architecture]}
    if "speculators_model_type" in config:
        return {**config, "speculators_model_type": name, **own, "sample_from_anchor": name == "dspark"}
    nested = config.pop("dflash_config")
    return {**config, **nested, **own} if name == "dspark" else {**config, "dflash_config": {**nested, **own}}


def write_draft(
    path: Path | str,
    target_path: Path | str,
    *,
    seed: int = 1,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    mlp: int = 128,
    block_size: int = 8,
    target_layer_ids: Sequence[int] | None = None,
    mask_token_id: int | None = None,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    attention_bias: bool = False,
    form: str = "zlab",
    dtype: str = "float32",
    rope_theta: float = 500_000.0,
    rope_scaling: dict[str, Any] | None = None,
    max_positions: int = 4096,
    token_ids: Sequence[int] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Path:
    """A draft for the target at `target_path`, with the target's width and vocabulary.

    Defaults: the second and the last but one block, mask token vocab - 2, full attention. token_ids: ascending, those
    that a reduced vocabulary has, of the speculators layout, with an lm_head of its own; None for the target's.
    own: the keys that make it a draft of another layout, as of DFLASH2, DSPARK and DOMINO; None for a DFlash draft.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}, expected one of {FORMS}")
    outer = storage.read_config(target_path)
    target = outer.get("text_config", outer)
    target_layers = target["num_hidden_layers"]
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    ids = [1, target_layers - 2] if target_layer_ids is None else list(target_layer_ids)
    mask = vocab - 2 if mask_token_id is None else mask_token_id
    types = ["full_attention"] * layers if layer_types is None else list(layer_types)
    if len(types) != layers:
        raise ValueError(f"{layers} layers but {len(types)} layer types")
    decoder: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "layer_types": types,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "dtype": dtype,
    }
    if form in ("rope_parameters", "speculators"):
        decoder["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})}
    else:
        decoder |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling}
    reduced = vocab if token_ids is None else len(token_ids)
    if form == "speculators":
        config = speculators_config(decoder, outer, Path(target_path), ids, mask, block_size, is_causal, reduced)
    else:
        config = zlab_config(decoder, ids, mask, block_size, is_causal, target_layers, form == "nested")
    if own is not None:
        config = of_layout(config, own)
    elsewhere: dict[str, torch.Tensor] = {}
    if token_ids is not None:
        kept = torch.tensor(token_ids)
        elsewhere = {"d2t": kept - torch.arange(reduced), "t2d": torch.zeros(vocab, dtype=torch.bool)}
        elsewhere["t2d"][kept] = True
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_config(folder, config)
    shapes = draft_shapes(
        hidden, len(ids), layers, heads, kv_heads, head_dim, mlp, attention_bias, vocab, reduced, own or {}
    )
    if token_ids is not None:
        shapes["lm_head.weight"] = (reduced, hidden)
    storage.save_tensors(
        folder,
        {name: draw(name, shape, seed, centre=1.0).to(getattr(torch, dtype)) for name, shape in shapes.items()}
        | elsewhere,
    )
    return folder
