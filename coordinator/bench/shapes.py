"""Published shapes of models, to measure without their weights: configurations that ask workers for random ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.model.random_weights import KEY, MXFP4_EXPERTS, PACKING

SYNTHETIC = "synthetic_acceptance"
"""The key by which a worker knows with what chance a draft token is taken all the same, where all before it are."""

BLOCK_SIZE = 16
"""Rows of the drafts' blocks: the known token and the draft tokens."""

DRAFT_KINDS: Mapping[str, Mapping[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    # From the known token's row on, so that a block of as many draft tokens has a row less.
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK_SIZE - 1,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    },
    "domino": {
        "architectures": ["DominoDraftModel"],
        "projector_type": "domino",
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
    },
}
"""What config.json of a draft of each layout has of its own: of DFlash2 as published, of the others sizes that are
like it."""

_COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
_QWEN3: Mapping[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
_QWEN3_5: Mapping[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GEMMA4: Mapping[str, Any] = {
    **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "tie_word_embeddings": True,
}
TARGETS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "llama-3.1-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        PACKING: MXFP4_EXPERTS,
    },
    "qwen3.5-35b-a3b": {
        **_QWEN3_5,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "qwen3.5-9b": {
        **_QWEN3_5,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "qwen3.6-27b": {
        **_QWEN3_5,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "gemma-4-31b": {
        **_GEMMA4,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "gemma-4-26b-a4b": {
        **_GEMMA4,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "glm-4.5-air": {
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": False,
    },
}
CAPTURES: Mapping[str, tuple[list[int], int]] = {
    "qwen3-0.6b": ([1, 7, 13, 19, 25], 151669),
    "qwen3-8b": ([1, 9, 17, 25, 33], 151669),
    "llama-3.1-8b": ([1, 8, 15, 22, 29], 128255),
    "qwen3-30b-a3b": ([1, 12, 23, 34, 45], 151669),
    "gpt-oss-20b": ([1, 6, 11, 16, 21], 201087),
    "qwen3.5-35b-a3b": ([1, 10, 19, 28, 37], 248070),
    "qwen3.5-9b": ([1, 8, 15, 22, 29], 248070),
    "qwen3.6-27b": ([1, 16, 31, 46, 61], 248070),
    "gemma-4-31b": ([1, 15, 29, 43, 57], 4),
    "gemma-4-26b-a4b": ([1, 7, 14, 20, 27], 4),
    "glm-4.5-air": ([1, 11, 22, 32, 43], 151551),
}
"""Of each shape's draft: the 0-based target layers whose output it reads, and the id of its mask token."""


def draft_config(shape: str, kind: str = "dflash", vocabulary: int | None = None) -> dict[str, Any]:
    """Return the config.json of a shape's five-layer draft; the largest looks back 2048 tokens.

    kind: of DRAFT_KINDS; a DFlash draft is as published. vocabulary: how many tokens it proposes, by an lm_head of its
    own; None for all of the target's.
    """
    target = TARGETS[shape]
    layers, mask = CAPTURES[shape]
    sliding = shape == "qwen3.6-27b"
    rope = target.get("rope_parameters", target)
    rope = rope.get("full_attention", rope)
    hidden, beside = target["hidden_size"], "top_k_experts" in target
    return {
        **_COMMON,
        "model_type": "qwen3",
        **{key: target[key] for key in ("hidden_size", "vocab_size")},
        # A target of experts alone doesn't have it, and beside experts a dense part is far smaller than a draft's.
        "intermediate_size": 3 * hidden if beside else target.get("intermediate_size", 3 * hidden),
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": rope["rope_theta"],
        "block_size": BLOCK_SIZE,
        "num_target_layers": target["num_hidden_layers"],
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "is_causal": False,
        "dflash_config": {"target_layer_ids": layers, "mask_token_id": mask},
        **({} if vocabulary is None else {"draft_vocab_size": vocabulary}),
        **DRAFT_KINDS[kind],
    }


def acceptance_chance(accepted: float) -> float:
    """Return the chance with which each draft token must be taken so that so many of a whole block are on average.

    accepted: from 0 to all of the block's draft tokens. Draft tokens behind one that is not taken are not taken either.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        if sum(chance**count for count in range(1, BLOCK_SIZE)) < accepted:
            low = chance
        else:
            high = chance
    return high


def write_shape(
    shape: str,
    directory: Path,
    accepted: float | None = None,
    packing: str | None = None,
    draft_kind: str = "dflash",
    draft_vocabulary: int | None = None,
) -> tuple[Path, Path]:
    """Write checkpoints of a shape and of its draft, without weights, and return the directories of both.

    accepted: how many draft tokens of a block are to be taken on average, None for those that the target chooses too.
    packing: what the target's matrices are packed in, of PACKINGS; None for what the shape's are published in, as
    gpt-oss's experts are. draft_kind, draft_vocabulary: as of `draft_config`.
    """
    paths = []
    synthetic = {} if accepted is None else {SYNTHETIC: acceptance_chance(accepted)}
    packed = {} if packing is None else {PACKING: packing}
    draft = draft_config(shape, draft_kind, draft_vocabulary)
    for name, config in (("target", {**TARGETS[shape], **synthetic, **packed}), ("draft", draft)):
        path = directory / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, KEY: True}), encoding="utf-8")
        paths.append(path)
    return paths[0], paths[1]
