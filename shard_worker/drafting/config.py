"""The shape of a DFlash draft, read from the key forms in which such checkpoints are published.

z-lab's files keep DFlash's own keys at the top level or under `dflash_config`; the speculators format nests the decoder
under `transformer_layer_config` and counts captured layers from their input. What is read decides acceptance, not
correctness, so nothing is guessed silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.errors import InvalidArgument, Unimplemented
from services.model.config import ConfigReader, LayerKind, check_heads

_REFUSED = {
    "DFlash2DraftModel": "DFlash2",
    "DSparkDraftModel": "DSpark",
    "DominoDraftModel": "Domino",
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A DFlash draft. capture_layers: 0-based target blocks, taken at their output, in the order of `fc`'s columns.

    causal: per layer; a causal layer's block rows do not see later ones. window: tokens, for sliding layers.
    """

    hidden_size: int
    mlp_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_position: int
    attention_bias: bool
    layer_kinds: tuple[LayerKind, ...]
    causal: tuple[bool, ...]
    window: int | None
    block_size: int
    mask_token_id: int
    capture_layers: tuple[int, ...]
    num_target_layers: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)


def read_draft_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Raises Unimplemented, by name, for draft formats that are not DFlash, InvalidArgument for keys out of range."""
    _refuse_other_formats(raw)
    decoder = raw.get("transformer_layer_config")
    merged = {**raw, **(decoder if isinstance(decoder, Mapping) else {}), **_own_keys(raw)}
    reader = ConfigReader(merged, "draft config.json")
    reader.only("hidden_act", "silu")
    reader.only("is_neox_style", True)
    reader.only("input_embedding_scale", 1.0)
    layers = reader.integer("num_hidden_layers")
    full = (LayerKind.FULL,) * layers
    if reader.flag("use_swa", False):
        kinds: tuple[LayerKind, ...] = (LayerKind.SLIDING,) * layers
    else:
        kinds = reader.layer_kinds(full, {LayerKind.FULL, LayerKind.SLIDING})
    heads = reader.integer("num_attention_heads")
    window_key = "swa_window_size" if reader.has("swa_window_size") else "sliding_window"
    config = DFlashConfig(
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", reader.integer("hidden_size") // heads),
        rope_theta=reader.rope_theta(10_000.0),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=reader.integer("max_position_embeddings", 32768),
        attention_bias=reader.flag("attention_bias", False),
        layer_kinds=kinds,
        causal=_causal(reader, kinds),
        window=reader.integer(window_key) if LayerKind.SLIDING in kinds else None,
        block_size=reader.integer("block_size", at_least=2),
        mask_token_id=reader.integer("mask_token_id", at_least=0),
        capture_layers=_capture_layers(reader, layers),
        num_target_layers=reader.integer("num_target_layers", 1),
    )
    check_heads(config.heads, config.kv_heads, "draft config.json")
    if config.mask_token_id >= config.vocab_size:
        raise InvalidArgument(
            f"draft config.json: mask_token_id is {config.mask_token_id}; it must be below vocab_size, "
            f"{config.vocab_size}",
            field="mask_token_id",
        )
    reduced = reader.raw("draft_vocab_size")
    if reduced is not None and reduced != config.vocab_size:
        raise Unimplemented(
            f"draft config.json: draft_vocab_size {reduced} is a reduced vocabulary, which is not supported; "
            f"use a draft with the full vocabulary of {config.vocab_size}",
            field="draft_vocab_size",
        )
    return config


def _own_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """DFlash's keys win over the decoder's; a top-level key wins over one in `dflash_config`."""
    nested = raw.get("dflash_config")
    names = ("block_size", "mask_token_id", "num_target_layers", "vocab_size")
    top = {name: raw[name] for name in names if raw.get(name) is not None}
    return {**(nested if isinstance(nested, Mapping) else {}), **top}


def _refuse_other_formats(raw: Mapping[str, Any]) -> None:
    names = [*(raw.get("architectures") or []), str(raw.get("speculators_model_type") or "dflash")]
    for name in names:
        label = _REFUSED.get(name) or {"dflash2": "DFlash2", "dspark": "DSpark"}.get(name.lower())
        if label is None and ("eagle" in name.lower() or "domino" in name.lower()):
            label = name
        if label is not None:
            raise Unimplemented(
                f"draft format {label} is not supported: only DFlash drafts are",
                field="architectures",
            )
    nested = raw.get("dflash_config") or {}
    for key, label in (
        ("dspark_target_layer_ids", "DSpark"),
        ("markov_rank", "DSpark"),
        ("projector_type", "Domino"),
        ("sample_from_anchor", "DFlash with sample_from_anchor"),
    ):
        if raw.get(key) or nested.get(key):
            raise Unimplemented(f"draft config.json: {key} marks a {label} draft, which is not supported")


def _causal(reader: ConfigReader, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Top level wins; without any flag a layer is causal exactly when it is sliding."""
    if reader.has("sliding_window_non_causal"):
        kept = not reader.flag("sliding_window_non_causal", False)
        return tuple(kept and kind is LayerKind.SLIDING for kind in kinds)
    for key in ("is_causal", "causal"):
        if reader.has(key):
            return (reader.flag(key, False),) * len(kinds)
    return tuple(kind is LayerKind.SLIDING for kind in kinds)


def _capture_layers(reader: ConfigReader, draft_layers: int) -> tuple[int, ...]:
    for key, shift in (
        ("target_layer_ids", 0),
        # These two count the state that enters a layer, which is the output of the one before.
        ("aux_hidden_state_layer_ids", -1),
        ("eagle_aux_hidden_state_layer_ids", -1),
    ):
        ids = reader.raw(key)
        if ids is not None:
            if not isinstance(ids, list) or not ids or any(not isinstance(i, int) for i in ids):
                raise InvalidArgument(f"draft config.json: {key} must list layer numbers", field=key)
            layers = tuple(index + shift for index in ids)
            if len(set(layers)) != len(layers) or min(layers) < 0:
                raise InvalidArgument(
                    f"draft config.json: {key} is {ids}; it must name different target blocks",
                    field=key,
                )
            return layers
    if reader.has("layer_ids"):
        raise Unimplemented(
            "draft config.json: layer_ids doesn't say whether it counts what enters or what leaves a block: give "
            "target_layer_ids, the blocks whose output is captured, from 0",
            field="layer_ids",
        )
    return default_capture_layers(reader.integer("num_target_layers", at_least=draft_layers + 3), draft_layers)


def default_capture_layers(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The blocks that a draft without a list was trained on: evenly spread from 1 to the last but two."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(draft_layers))
