"""What a DFlash draft takes on a device, and what it wants of the target: from its headers and its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.planning.model_size import ModelSize
from coordinator.planning.tensor_headers import read_headers
from coordinator.text.tokenizer import read_json_object
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.tensors import ITEM_BYTES

_KEYS = re.compile(r"^(?:layers\.(?P<layer>\d+)|midlayer)\.self_attn\.k_proj\.weight$")
# Copies of the target's own tensors, which are not loaded.
_IGNORED = re.compile(r"^(embed_tokens\.weight|lm_head\.weight|t2d|verifier_.*|.*rotary_emb\.inv_freq)$")


@dataclass(frozen=True, slots=True)
class DraftSize:
    """A draft. capture_layers: 0-based target blocks. layer_tokens: positions that each layer keeps, None for all.

    token_bytes: keys and values of one position in one layer. capture_bytes: columns of `fc` for one captured block,
    which each stage keeps for the blocks it captures.
    """

    weight_bytes: int
    item_bytes: int
    hidden_size: int
    block_size: int
    capture_layers: tuple[int, ...]
    layer_tokens: tuple[int | None, ...]
    token_bytes: int
    capture_bytes: int

    def cache_bytes(self, length: int) -> int:
        """Of one session of up to `length` tokens."""
        slots = length + self.block_size
        return sum(
            self.token_bytes * (slots if kept is None else min(slots, kept + self.block_size))
            for kept in self.layer_tokens
        )

    def captured(self, layers: LayerRange) -> int:
        """How many of these layers it captures."""
        return sum(1 for layer in self.capture_layers if layer in layers)


def read_draft_size(directory: Path, target: ModelSize, dtype: str | None) -> DraftSize:
    """dtype: what --dtype says, None for the draft's own.

    Raises InvalidArgument for a checkpoint that is no DFlash draft or was made for another target.
    """
    field = "--draft"
    headers = {name: one for name, one in read_headers(directory, field).items() if not _IGNORED.match(name)}
    raw = read_json_object(directory / "config.json")
    decoder, own = raw.get("transformer_layer_config"), raw.get("dflash_config")
    config: dict[str, Any] = {**raw, **_object(decoder), **_object(own)}
    config |= {name: raw[name] for name in ("block_size",) if raw.get(name) is not None}
    fc = headers.get("fc.weight") or headers.get("encoder.fc.weight")
    keys = sorted((int(match["layer"] or 0), name) for name in headers if (match := _KEYS.match(name)))
    block = config.get("block_size")
    if fc is None or not keys or not isinstance(block, int):
        raise InvalidArgument(
            f"{field} {str(directory)!r} is no DFlash draft: it lacks fc.weight, layers or block_size; name a DFlash "
            "checkpoint made for the target",
            field=field,
        )
    if fc.shape[0] != target.hidden_size:
        raise InvalidArgument(
            f"the draft's hidden_size is {fc.shape[0]}, the target's {target.hidden_size}: name a draft made for this "
            "target",
            field=field,
        )
    chosen = dtype or fc.element_type("fc.weight")
    return DraftSize(
        weight_bytes=sum(header.size_bytes(name, chosen) for name, header in headers.items()),
        item_bytes=ITEM_BYTES[chosen],
        hidden_size=fc.shape[0],
        block_size=block,
        capture_layers=_capture_layers(config, len(keys), len(target.layers), fc.shape[1] // fc.shape[0]),
        layer_tokens=_layer_tokens(config, len(keys)),
        token_bytes=2 * headers[keys[0][1]].shape[0] * ITEM_BYTES[chosen],
        capture_bytes=fc.shape[0] * fc.shape[0] * ITEM_BYTES[target.dtype],
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _layer_tokens(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("swa_window_size") or config.get("sliding_window")
    kinds = config.get("layer_types")
    if config.get("use_swa"):
        return (window,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _capture_layers(config: Mapping[str, Any], layers: int, target_layers: int, count: int) -> tuple[int, ...]:
    """Without a list, the blocks that such a draft was trained on: evenly spread."""
    for key, shift in (
        ("target_layer_ids", 0),
        ("aux_hidden_state_layer_ids", -1),
        ("eagle_aux_hidden_state_layer_ids", -1),
    ):
        ids = config.get(key)
        if isinstance(ids, list) and len(ids) == count and all(isinstance(index, int) for index in ids):
            captured = tuple(index + shift for index in ids)
            if max(captured) >= target_layers:
                raise InvalidArgument(
                    f"the draft captures block {max(captured)}, the target has {target_layers} blocks: name a draft "
                    "made for this target",
                    field="--draft",
                )
            return captured
    if layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + index * step) for index in range(layers))
