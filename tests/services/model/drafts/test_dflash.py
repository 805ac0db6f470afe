"""Draft configs in all published spellings, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.choosers.dflash2 import SelectorConfig
from services.model.choosers.domino import CorrectionConfig
from services.model.choosers.dspark import MarkovConfig, MarkovHeadType
from services.model.config import LayerKind
from services.model.drafts.dflash import (
    BlockConvolutionShape,
    DFlashConfig,
    default_capture_layers,
    read_config,
)

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 5e6,
}
PLAIN: dict[str, Any] = DECODER | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 254, "target_layer_ids": [1, 6]},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": DECODER,
    "aux_hidden_state_layer_ids": [2, 7],
    "block_size": 8,
    "mask_token_id": 254,
    "draft_vocab_size": 256,
    "sample_from_anchor": False,
}
DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 6,
}
DSPARK: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "markov_head_type": "gated"}
DOMINO: dict[str, Any] = {
    "architectures": ["DominoDraftModel"],
    "dflash_config": {"projector_type": "domino", "gru_hidden_dim": 12, "emb_dim": 10, "pure_draft_prefix_len": 1},
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 32}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes over a config, mappings into mappings; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def read(base: dict[str, Any], **changes: Any) -> DFlashConfig:
    return read_config(merged(base, changes))


def test_both_layouts_describe_one_draft() -> None:
    """z-lab's keys and the speculators layout, whose ids are one higher, give one shape."""
    plain = read(PLAIN, num_target_layers=None)

    assert plain == read(SPECULATORS)
    assert (plain.block_size, plain.mask_token_id, plain.capture_layers) == (8, 254, (1, 6))
    assert (plain.rope.theta, plain.norm_eps, plain.max_position) == (5e6, 1e-5, 2048)
    assert plain.layer_kinds == (FULL,) * 3
    assert plain.causal == (False,) * 3


def test_dflash_keys_are_found_at_both_levels() -> None:
    """Block size and mask token count at the top and in dflash_config; the top level wins."""
    inside = read(PLAIN, block_size=None, dflash_config={"block_size": 16})
    both = read(PLAIN, dflash_config={"block_size": 16}, mask_token_id=7)

    assert inside.block_size == 16
    assert (both.block_size, both.mask_token_id) == (8, 7)


def test_theta_is_found_in_all_places() -> None:
    """rope_theta at the top, in rope_parameters, and in either within a speculators decoder."""
    newer = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}

    assert read(PLAIN, **newer).rope.theta == 1e7
    assert read(SPECULATORS, transformer_layer_config=newer).rope.theta == 1e7


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"dflash_config": {"target_layer_ids": [4, 0, 11]}}, (4, 0, 11)),
        ({"dflash_config": {"target_layer_ids": None}, "target_layer_ids": [3, 5]}, (3, 5)),
        ({"dflash_config": {"target_layer_ids": None}, "aux_hidden_state_layer_ids": [1, 12]}, (0, 11)),
        ({"dflash_config": {"target_layer_ids": None}, "eagle_aux_hidden_state_layer_ids": [3, 5]}, (2, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 7]}, (1, 6)),
        ({"dflash_config": {"target_layer_ids": None}}, (1, 5, 9)),
    ],
)
def test_captured_blocks_are_counted_by_their_output(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    """Every key form leads to blocks whose output is captured, from 0 and in the list's order."""
    assert read(PLAIN, **changes).capture_layers == layers


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (24, 1, (12,)),
    ],
)
def test_blocks_without_a_list_are_those_of_published_drafts(
    target: int, draft: int, expected: tuple[int, ...]
) -> None:
    """The default spreads from block 1 to the last but two, as published drafts' own lists do."""
    assert default_capture_layers(target, draft) == expected


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (True, False, True)),
        ({"is_causal": True}, (True, True, True)),
        ({"is_causal": False}, (False, False, False)),
        ({"dflash_config": {"causal": True}}, (True, True, True)),
        ({"dflash_config": {"causal": False}}, (False, False, False)),
        ({"is_causal": False, "dflash_config": {"causal": True}}, (False, False, False)),
        ({"sliding_window_non_causal": True}, (False, False, False)),
        ({"sliding_window_non_causal": False}, (True, False, True)),
    ],
)
def test_which_layers_are_causal(changes: dict[str, Any], causal: tuple[bool, ...]) -> None:
    """A flag decides, the top level first; without one exactly the sliding layers are causal."""
    assert read(PLAIN, **MIXED, **changes).causal == causal


@pytest.mark.parametrize(
    ("changes", "causal"),
    [({}, True), ({"sliding_window_non_causal": False}, True), ({"sliding_window_non_causal": True}, False)],
)
def test_a_speculators_draft_is_causal_where_it_slides(changes: dict[str, Any], causal: bool) -> None:
    """Without sliding_window_non_causal the sliding layers of that layout, and only they, are causal."""
    own = read(SPECULATORS, transformer_layer_config=MIXED, **changes)

    assert own.layer_kinds == (SLIDING, FULL, SLIDING)
    assert own.causal == (causal, False, causal)
    assert own.window == 32


def test_dflash2_is_read_in_both_layouts() -> None:
    """Its own keys stand in dflash_config or at the top; in the speculators layout sliding layers are not causal unless
    it says so."""
    own = {key: value for key, value in DFLASH2.items() if key != "architectures"}
    plain = read(PLAIN, architectures=DFLASH2["architectures"], dflash_config=own, **MIXED)
    nested = {"speculators_model_type": "dflash2", "transformer_layer_config": MIXED, **DFLASH2}

    assert plain.chooser == SelectorConfig(rank=8, candidates=6)
    assert plain.convolution == BlockConvolutionShape(taps=2, group=16)
    assert plain.causal == (True, False, True)
    assert read(PLAIN, is_causal=False, **MIXED, **DFLASH2) == read(SPECULATORS, num_target_layers=12, **nested)
    assert read(SPECULATORS, **nested, sliding_window_non_causal=False).causal == (True, False, True)


def test_dspark_is_read_in_both_layouts() -> None:
    """Its own keys stand at the top; it proposes from the known token's row on, unless it says otherwise."""
    nested = PLAIN["dflash_config"]
    native = read(PLAIN, dflash_config=None, **nested, **DSPARK)
    own = {"speculators_model_type": "dspark", **DSPARK}

    assert native.chooser == MarkovConfig(8, MarkovHeadType.GATED, confidence=True, confidence_with_token=True)
    assert (native.from_anchor, native.block_size) == (True, 9)
    assert native == read(SPECULATORS, num_target_layers=12, sample_from_anchor=True, **own)
    behind = read(SPECULATORS, **own)
    assert (behind.from_anchor, behind.block_size) == (False, 8)
    assert read(PLAIN, sample_from_anchor=True).block_size == 9


def test_domino_says_where_it_begins_by_a_key_of_its_own() -> None:
    """Shifted labels make the known token's row the first one that proposes; sliding layers are not causal unless it
    says so."""
    plain = read(PLAIN, **MIXED, **DOMINO)
    shifted = read(PLAIN, **merged(DOMINO, {"dflash_config": {"shift_label": True}}))

    assert plain.chooser == CorrectionConfig(state=12, inner=10, uncorrected=1, from_anchor=False)
    assert (plain.from_anchor, plain.block_size, plain.causal) == (False, 8, (False, False, False))
    assert (shifted.from_anchor, shifted.block_size) == (True, 9)
    assert read(PLAIN, is_causal=True, **MIXED, **DOMINO).causal == (True, True, True)


def test_use_swa_makes_every_layer_slide() -> None:
    """dflash_config's use_swa and swa_window_size win over layer_types and sliding_window."""
    own = read(PLAIN, **MIXED, dflash_config={"use_swa": True, "swa_window_size": 12, "causal": False})

    assert own.layer_kinds == (SLIDING,) * 3
    assert own.window == 12
    assert own.causal == (False,) * 3


def test_a_window_without_sliding_layers_is_ignored() -> None:
    """sliding_window alone makes no layer slide."""
    assert read(PLAIN, sliding_window=32).window is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, InvalidArgument, "selector_rank is None"),
        (
            DFLASH2 | {"draft_vocab_size": 128},
            InvalidArgument,
            "is 128; .* all tokens of the target, 256",
        ),
        (
            DFLASH2 | {"selector_top_k": 257},
            InvalidArgument,
            "is 257; it must be at most vocab_size, 256",
        ),
        (DFLASH2 | {"conv_kernel_size": 9}, InvalidArgument, "conv_kernel_size is 9; it must be at most block_size, 8"),
        (DFLASH2 | {"conv_group_size": 24}, InvalidArgument, "conv_group_size is 24; it must divide hidden_size, 64"),
        ({"architectures": ["DSparkDraftModel"]}, InvalidArgument, "markov_rank is None"),
        (DSPARK | {"markov_head_type": "lstm"}, InvalidArgument, "'lstm'; it must be one of vanilla, gated, rnn"),
        (DSPARK | {"enable_confidence_head": "yes"}, InvalidArgument, "must be true or false"),
        ({"architectures": ["DominoDraftModel"]}, InvalidArgument, "gru_hidden_dim is None"),
        (merged(DOMINO, {"dflash_config": {"emb_dim": 0}}), InvalidArgument, "emb_dim is 0"),
        (
            merged(DOMINO, {"dflash_config": {"pure_draft_prefix_len": -1}}),
            InvalidArgument,
            "pure_draft_prefix_len is -1",
        ),
        ({"attn_output_gate": True}, Unimplemented, "attn_output_gate"),
        ({"architectures": ["LlamaEagle3ForCausalLM"]}, Unimplemented, "LlamaEagle3"),
        ({"speculators_model_type": "dspark"}, InvalidArgument, "markov_rank is None"),
        ({"speculators_model_type": "xpress"}, Unimplemented, "xpress"),
        ({"speculators_model_type": "eagle3"}, Unimplemented, "eagle3"),
        ({"dflash_config": {"projector_type": "domino"}}, InvalidArgument, "gru_hidden_dim is None"),
        ({"dflash_config": {"markov_rank": 256}}, Unimplemented, "DSpark"),
        ({"dspark_target_layer_ids": [1, 6]}, Unimplemented, r"dspark_target_layer_ids \[1, 6\] is not supported"),
        (DSPARK | {"dspark_target_layer_ids": [1]}, Unimplemented, "dspark_target_layer_ids"),
        ({"draft_vocab_size": 257}, InvalidArgument, "draft_vocab_size is 257; it must be at most vocab_size, 256"),
        ({"draft_vocab_size": 0}, InvalidArgument, "draft_vocab_size is 0"),
        ({"input_embedding_scale": 2.0}, Unimplemented, "input_embedding_scale"),
        ({"dflash_config": {"input_embedding_scale": 0.5}}, Unimplemented, "input_embedding_scale"),
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"dflash_config": {"is_neox_style": False}}, Unimplemented, "is_neox_style"),
        ({"rope_scaling": {"type": "longrope", "factor": 32.0}}, Unimplemented, "longrope"),
        ({"dflash_config": {"target_layer_ids": None}, "layer_ids": [1, 6]}, Unimplemented, "layer_ids"),
        ({"dflash_config": {"mask_token_id": 256}}, InvalidArgument, "mask_token_id is 256"),
        ({"dflash_config": {"mask_token_id": -1}}, InvalidArgument, "mask_token_id is -1"),
        ({"dflash_config": {"mask_token_id": None}}, InvalidArgument, "mask_token_id is None"),
        ({"block_size": None}, InvalidArgument, "block_size is None"),
        ({"block_size": 1}, InvalidArgument, "block_size is 1"),
        ({"dflash_config": {"target_layer_ids": [6, 6]}}, InvalidArgument, "different target blocks"),
        ({"dflash_config": {"target_layer_ids": []}}, InvalidArgument, "must list layer numbers"),
        ({"dflash_config": {"target_layer_ids": ["1"]}}, InvalidArgument, "must list layer numbers"),
        (
            {"dflash_config": {"target_layer_ids": None}, "aux_hidden_state_layer_ids": [0, 3]},
            InvalidArgument,
            "different target blocks",
        ),
        (
            {"dflash_config": {"target_layer_ids": None}, "num_target_layers": 5},
            InvalidArgument,
            "num_target_layers is 5",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, InvalidArgument, "sliding_window is None"),
        ({"layer_types": ["linear_attention"] * 3, "sliding_window": 9}, InvalidArgument, "layer_types"),
        ({"num_key_value_heads": 3}, InvalidArgument, "num_attention_heads is 4"),
    ],
)
def test_what_is_not_a_plain_dflash_draft_is_refused(
    changes: dict[str, Any], kind: type[FlashsplitError], words: str
) -> None:
    """Other draft formats, and keys that ask for other math or contradict each other, are refused by name."""
    read(PLAIN)
    with pytest.raises(kind, match=words):
        read(PLAIN, **changes)
