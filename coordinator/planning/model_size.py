"""What a target takes on a device: bytes of weights and of a session's caches, layer by layer.

Read from the checkpoint's headers by the names that all families' files share, so that nothing here knows a family.
The figures are those of what a worker allocates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.planning.tensor_headers import TensorHeader, read_headers
from coordinator.text.tokenizer import read_json_object
from services.errors import InvalidArgument, Unimplemented
from services.layers import LayerRange
from services.messages.tensors import ITEM_BYTES

_LAYER = re.compile(r"^(?P<prefix>model\.language_model\.|model\.|)layers\.(?P<layer>\d+)\.(?P<rest>.+)$")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_LINEAR = ("linear_attn.A_log", "linear_attn.norm.weight", "linear_attn.conv1d.weight")
_ATTENTION = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
"""What the sizes of a layer's caches are read from."""

STATE_BYTES = 4
"""Recurrent state is float32 always."""

DEFAULT_KEY_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class LayerSize:
    """One layer. kind: in Hugging Face's words. All in bytes.

    token_bytes: keys and values of one position. state_bytes: what a recurrent layer holds whatever the length;
    block_row_bytes: and for each row of the largest verify. read_bytes: matrices that a one-row step reads.
    """

    kind: str
    weight_bytes: int
    read_bytes: int
    token_bytes: int
    state_bytes: int
    block_row_bytes: int

    def cache_bytes(self, length: int, block_rows: int) -> int:
        """Of one session of up to `length` tokens."""
        return self.token_bytes * length + self.state_bytes + self.block_row_bytes * block_rows


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A target. Bytes at the element types it is to be loaded with; hidden_size and vocab_size count elements.

    kv_dtype: of attention keys and values.
    """

    dtype: str
    kv_dtype: str
    layers: tuple[LayerSize, ...]
    hidden_size: int
    vocab_size: int
    max_position: int
    embedding_bytes: int
    norm_bytes: int
    head_bytes: int
    tied_head: bool

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Of the whole model on one device."""
        ends = self.embedding_bytes + self.norm_bytes + (0 if self.tied_head else self.head_bytes)
        return sum(layer.weight_bytes for layer in self.layers) + ends

    def layers_bytes(self, layers: LayerRange) -> int:
        """Weights of some layers, without embedding and head."""
        return sum(layer.weight_bytes for layer in self.layers[layers.first : layers.last])


def read_model_size(
    directory: Path, dtype: str | None, kv_dtype: str | None = None, field: str = "--model"
) -> ModelSize:
    """dtype: what --dtype says, None for the checkpoint's own. kv_dtype: of keys and values, None for the weights'.

    Raises InvalidArgument for a checkpoint without layers or embedding, Unimplemented for element types that are not
    served, and what `read_headers` raises.
    """
    headers = read_headers(directory, field)
    config = read_json_object(directory / "config.json")
    nested = config.get("text_config")
    decoder: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    named: dict[int, dict[str, TensorHeader]] = {}
    prefix = ""
    for name, header in headers.items():
        match = _LAYER.match(name)
        if match is not None and not _IGNORED.search(name):
            prefix = match["prefix"]
            named.setdefault(int(match["layer"]), {})[match["rest"]] = header
    embedding = headers.get(prefix + "embed_tokens.weight")
    if sorted(named) != list(range(len(named))) or not named or embedding is None:
        raise InvalidArgument(
            f"{field} {str(directory)!r} has not all of model.layers.0 to model.layers.N and model.embed_tokens: name "
            "a whole checkpoint of a decoder",
            field=field,
        )
    first = next((header for rest, header in named[0].items() if rest.endswith("mlp.gate_proj.weight")), embedding)
    chosen = dtype or first.element_type("layer 0")
    tied = bool(decoder.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    head = embedding if tied else headers.get("lm_head.weight")
    norm = headers.get(prefix + "norm.weight")
    if head is None or norm is None:
        missing = "lm_head.weight" if head is None else f"{prefix}norm.weight"
        raise InvalidArgument(f"tensor {missing} is missing in {directory}", field=field)
    position = decoder.get("max_position_embeddings", 32768)
    return ModelSize(
        dtype=chosen,
        kv_dtype=kv_dtype or chosen,
        layers=tuple(
            _layer_size(tensors, chosen, kv_dtype or chosen, _kind(decoder, layer, tensors), decoder)
            for layer, tensors in sorted(named.items())
        ),
        hidden_size=embedding.shape[1],
        vocab_size=embedding.shape[0],
        max_position=position if isinstance(position, int) else 32768,
        embedding_bytes=embedding.size_bytes("embed_tokens.weight", chosen),
        norm_bytes=norm.size_bytes("norm.weight", chosen),
        head_bytes=head.size_bytes("lm_head.weight", chosen),
        tied_head=tied,
    )


def _kind(config: Mapping[str, Any], layer: int, tensors: Mapping[str, TensorHeader]) -> str:
    if "linear_attn.A_log" in tensors:
        return "linear_attention"
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer])
    if config.get("use_sliding_window") and layer >= config.get("max_window_layers", 28):
        return "sliding_attention"
    return "full_attention"


def _layer_size(
    tensors: Mapping[str, TensorHeader], dtype: str, kv_dtype: str, kind: str, config: Mapping[str, Any]
) -> LayerSize:
    weights = {name: header.size_bytes(name, dtype) for name, header in tensors.items()}
    matrices = sum(size for name, size in weights.items() if len(tensors[name].shape) == 2)
    item, token, state, row = ITEM_BYTES[dtype], 0, 0, 0
    needed = _LINEAR if kind == "linear_attention" else _ATTENTION
    for name in needed:
        if name not in tensors:
            raise Unimplemented(
                f"a {kind} layer without {name}: caches of this family are not known; plan with one that "
                "flashsplit-worker serves",
                field=name,
            )
    if kind == "linear_attention":
        heads, value_dim = tensors["linear_attn.A_log"].shape[0], tensors["linear_attn.norm.weight"].shape[0]
        channels, *_, taps = tensors["linear_attn.conv1d.weight"].shape
        key_dim = int(config.get("linear_key_head_dim") or DEFAULT_KEY_HEAD_DIM)
        state = heads * key_dim * value_dim * STATE_BYTES + (taps - 1) * channels * item
        # A verify's own rows: the convolution's inputs, keys, corrected values and running decays.
        row = channels * item + heads * (key_dim + value_dim + 1) * STATE_BYTES
    else:
        # Keys and values are as wide as the projections that make them.
        width = tensors["self_attn.k_proj.weight"].shape[0] + tensors["self_attn.v_proj.weight"].shape[0]
        token = width * ITEM_BYTES[kv_dtype]
    return LayerSize(kind, sum(weights.values()), matrices, token, state, row)
