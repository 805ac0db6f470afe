"""A DFlash draft (arXiv 2602.06036) as its checkpoint describes it, in all key forms in which such are published.

z-lab's files keep DFlash's own keys at the top level or under `dflash_config`; the speculators format nests the decoder
under `transformer_layer_config` and counts captured layers from their input. What is read decides acceptance, not
correctness, so nothing is assumed silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import InvalidArgument, Unimplemented
from services.model.cached_tensors import held_positions
from services.model.choosers import ChooserConfig, chooser_format, chooser_name
from services.model.choosers.argmax import ArgmaxConfig
from services.model.config import AttentionShape, LayerKind, check_heads, read_layer_kinds
from services.model.config_reader import ConfigReader
from services.model.rope import Rope, context_length, read_rope
from services.model.tensor_headers import TensorHeader

LAYOUTS = ("dspark", "domino")
"""As of `DraftFormat`: layouts of the same layers that are not called after DFlash."""

_REFUSED = ("eagle", "xpress")
"""Marks of layouts that are not served, in lower case."""
_ALIASES = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    # Containers of what chooses tokens.
    (re.compile(r"^(logit_head|logits_correction)\."), ""),
)
# Copies of the target's own tensors, which are shared instead, and a map that follows from the other one.
_IGNORED = re.compile(r"^(embed_tokens\.weight|t2d|verifier_.*|.*rotary_emb\.inv_freq)$")

TOKEN_OFFSETS = "d2t"
"""The tensor that says for which tokens of the target the rows of a reduced vocabulary stand: how much more the token's
number is than the row's. It is no weight, and not among `tensor_shapes`."""


@dataclass(frozen=True, slots=True)
class BlockConvolutionShape:
    """Convolutions over a block's rows around every sublayer, as DFlash2 has them.

    taps: how many rows each one mixes, itself and those before it. group: how many neighbouring elements share the part
    of the kernels that depends on the row.
    """

    taps: int
    group: int


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A DFlash draft. Sizes count elements; positions and windows count tokens."""

    hidden_size: int
    mlp_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    max_position: int
    attention_bias: bool
    layer_kinds: tuple[LayerKind, ...]
    causal: tuple[bool, ...]
    """By layer: whether a block's rows do not see later ones of the block."""
    window: int | None
    """How far sliding layers look back, in tokens."""
    block_size: int
    """Rows of a verify: the known token and the most draft tokens of one proposal."""
    mask_token_id: int
    capture_layers: tuple[int, ...]
    """The 0-based target blocks whose output is read, in the order of the columns of `fc`."""
    num_target_layers: int
    draft_vocab_size: int | None = None
    """How many tokens the draft has an lm_head of its own for; None where it shares the target's."""
    chooser: ChooserConfig = ArgmaxConfig()
    """How it chooses tokens by the logits of a block."""
    from_anchor: bool = False
    """Whether the row of the known token already stands for the first draft token, so that a block has as many rows as
    draft tokens; else each draft token has a row of its own behind that one."""
    convolution: BlockConvolutionShape | None = None
    """What surrounds the sublayers of all layers, None for nothing."""

    @property
    def layout(self) -> str:
        """What drafts of this layout are called."""
        return self.chooser.layout

    @property
    def chooser_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of each tensor of the chooser."""
        return self.chooser.tensor_shapes(self.hidden_size, self.vocab_size, self.draft_vocab_size or self.vocab_size)

    @property
    def num_layers(self) -> int:
        """How many layers the draft has."""
        return len(self.layer_kinds)

    def attention(self, layer: int) -> AttentionShape:
        """Return how a layer attends."""
        window = self.window if self.layer_kinds[layer] is LayerKind.SLIDING else None
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.rope, window)

    def cached_elements(self, max_length: int) -> int:
        """Return how many elements of keys and values a session of up to `max_length` tokens caches.

        A layer has room for all positions and a block behind them, a sliding one for as many as `held_positions` says.
        """
        windows = [self.window if kind is LayerKind.SLIDING else None for kind in self.layer_kinds]
        block = self.block_size
        positions = sum(held_positions(max_length + block, window, block) for window in windows)
        return 2 * self.kv_heads * self.head_dim * positions


def read_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Read a config.json.

    Raises Unimplemented, by name, for layouts that are not served, InvalidArgument for keys out of range.
    """
    _refuse_other_formats(raw)
    decoder = raw.get("transformer_layer_config")
    merged = {**raw, **(decoder if isinstance(decoder, Mapping) else {}), **_own_keys(raw)}
    reader = ConfigReader(merged, "draft config.json")
    reader.only("hidden_act", "silu")
    reader.only("is_neox_style", True)
    reader.only("input_embedding_scale", 1.0)
    reader.only("attn_output_gate", False)
    name = chooser_name(raw)
    chooser = chooser_format(name).read_config(reader)
    # What DeepSeek-V4 has of its own, beside layers of another kind.
    reader.only("dspark_target_layer_ids")
    if name != "dspark" and reader.has("markov_rank"):
        raise Unimplemented(
            "draft config.json: markov_rank marks a DSpark draft, but its architectures name none", field="markov_rank"
        )
    from_anchor = reader.flag("sample_from_anchor", chooser.from_anchor)
    layers = reader.integer("num_hidden_layers")
    full = (LayerKind.FULL,) * layers
    if reader.flag("use_swa", False):
        kinds: tuple[LayerKind, ...] = (LayerKind.SLIDING,) * layers
    else:
        kinds = read_layer_kinds(reader, full, {LayerKind.FULL, LayerKind.SLIDING})
    heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", reader.integer("hidden_size") // heads)
    rope = read_rope(reader, head_dim)
    window_key = "swa_window_size" if reader.has("swa_window_size") else "sliding_window"
    config = DFlashConfig(
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=context_length(reader, rope),
        attention_bias=reader.flag("attention_bias", False),
        layer_kinds=kinds,
        causal=_causal(reader, kinds, sliding=not (name == "domino" or (name == "dflash2" and decoder is not None))),
        window=reader.integer(window_key) if LayerKind.SLIDING in kinds else None,
        block_size=reader.integer("block_size", at_least=2) + int(from_anchor),
        mask_token_id=reader.integer("mask_token_id", at_least=0),
        capture_layers=_capture_layers(reader, layers),
        num_target_layers=reader.integer("num_target_layers", 1),
        draft_vocab_size=_reduced_vocabulary(reader),
        chooser=chooser,
        from_anchor=from_anchor,
        convolution=_convolution(reader) if name == "dflash2" else None,
    )
    check_heads(config.heads, config.kv_heads, "draft config.json")
    if config.mask_token_id >= config.vocab_size:
        raise InvalidArgument(
            f"draft config.json: mask_token_id is {config.mask_token_id}; it must be below vocab_size, "
            f"{config.vocab_size}",
            field="mask_token_id",
        )
    return config


def tensor_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a draft's weights."""
    hidden, mlp = config.hidden_size, config.mlp_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        # The draft reads the target's embedding rows, so both have one hidden size.
        "fc.weight": (hidden, len(config.capture_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.draft_vocab_size is not None:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    shapes |= config.chooser_shapes
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        attention = f"{prefix}self_attn."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, mlp),
            f"{attention}q_proj.weight": (queries, hidden),
            f"{attention}k_proj.weight": (keys, hidden),
            f"{attention}v_proj.weight": (keys, hidden),
            f"{attention}o_proj.weight": (hidden, queries),
            f"{attention}q_norm.weight": (config.head_dim,),
            f"{attention}k_norm.weight": (config.head_dim,),
        }
        if config.convolution is not None:
            taps, groups = config.convolution.taps, hidden // config.convolution.group
            for sublayer in ("attention", "mlp"):
                shapes |= {
                    f"{prefix}{sublayer}_conv.base_kernel": (2, taps, hidden),
                    f"{prefix}{sublayer}_conv.kernel_projection.weight": (2 * taps * groups, hidden),
                }
        if config.attention_bias:
            extents = {"q": queries, "k": keys, "v": keys, "o": hidden}
            shapes |= {f"{attention}{part}_proj.bias": (size,) for part, size in extents.items()}
    return shapes


def find_tensors(config: DFlashConfig, headers: Mapping[str, TensorHeader], directory: Path) -> dict[str, str]:
    """Return the name in the checkpoint of every tensor of `tensor_shapes`. directory: named in errors.

    Raises InvalidArgument for missing, unknown or mis-shaped tensors, `TOKEN_OFFSETS` among them.
    """
    if config.draft_vocab_size is not None:
        _check_token_offsets(headers.get(TOKEN_OFFSETS), config.draft_vocab_size, directory)
    names: dict[str, str] = {}
    for stored in headers:
        name = stored
        for pattern, plain in _ALIASES:
            name = pattern.sub(plain, name)
        if not _IGNORED.match(name) and name != (
            "lm_head.weight" if config.draft_vocab_size is None else TOKEN_OFFSETS
        ):
            names[name] = stored
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in names:
            raise InvalidArgument(f"draft tensor {name} is missing in {directory}", reason="TENSOR_MISSING", field=name)
        stored_shape = headers[names[name]].shape
        if stored_shape != shape:
            raise InvalidArgument(
                f"draft tensor {name} has shape {list(stored_shape)}, config.json asks for {list(shape)}",
                reason="TENSOR_SHAPE",
                field=name,
            )
    unknown = sorted(set(names) - set(shapes))
    if unknown:
        raise InvalidArgument(
            f"draft tensor {unknown[0]} is not one that a DFlash draft has ({len(unknown)} such tensors): "
            "the checkpoint is of another draft format",
            field=unknown[0],
        )
    return names


def is_multiplied_apart(name: str) -> bool:
    """As of `DraftFormat`: the target's features become keys and values without queries."""
    return name.endswith(("k_proj.weight", "v_proj.weight"))


def _check_token_offsets(header: TensorHeader | None, draft_vocab_size: int, directory: Path) -> None:
    expected = f"a draft of {draft_vocab_size} tokens has one whole number for each, I64 or I32"
    if header is None:
        raise InvalidArgument(
            f"draft tensor {TOKEN_OFFSETS} is missing in {directory}: {expected}",
            reason="TENSOR_MISSING",
            field=TOKEN_OFFSETS,
        )
    if header.shape != (draft_vocab_size,) or header.code not in ("I64", "I32"):
        raise InvalidArgument(
            f"draft tensor {TOKEN_OFFSETS} is {header.code} of shape {list(header.shape)}: {expected}",
            reason="TENSOR_SHAPE",
            field=TOKEN_OFFSETS,
        )


def _own_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return DFlash's own keys, which win over the decoder's; a top-level key wins over one in `dflash_config`."""
    nested = raw.get("dflash_config")
    names = ("block_size", "mask_token_id", "num_target_layers", "vocab_size")
    top = {name: raw[name] for name in names if raw.get(name) is not None}
    return {**(nested if isinstance(nested, Mapping) else {}), **top}


def _refuse_other_formats(raw: Mapping[str, Any]) -> None:
    nested = raw.get("dflash_config") or {}
    names = [*(raw.get("architectures") or []), raw.get("speculators_model_type"), nested.get("projector_type")]
    for name in map(str, filter(None, names)):
        if any(mark in name.lower() for mark in _REFUSED):
            raise Unimplemented(
                f"draft format {name} is not supported: only DFlash, DFlash2, DSpark and Domino drafts are",
                field="architectures",
            )


def _convolution(reader: ConfigReader) -> BlockConvolutionShape:
    shape = BlockConvolutionShape(taps=reader.integer("conv_kernel_size"), group=reader.integer("conv_group_size"))
    hidden, block = reader.integer("hidden_size"), reader.integer("block_size", at_least=2)
    if shape.taps > block:
        raise InvalidArgument(
            f"{reader.source}: conv_kernel_size is {shape.taps}; it must be at most block_size, {block}",
            field="conv_kernel_size",
        )
    if hidden % shape.group:
        raise InvalidArgument(
            f"{reader.source}: conv_group_size is {shape.group}; it must divide hidden_size, {hidden}",
            field="conv_group_size",
        )
    return shape


def _causal(reader: ConfigReader, kinds: tuple[LayerKind, ...], *, sliding: bool) -> tuple[bool, ...]:
    """Read for each layer whether it is causal. sliding: whether without a flag sliding layers are, and only they."""
    if reader.has("sliding_window_non_causal"):
        sliding = not reader.flag("sliding_window_non_causal", False)
        return tuple(sliding and kind is LayerKind.SLIDING for kind in kinds)
    for key in ("is_causal", "causal"):
        if reader.has(key):
            return (reader.flag(key, False),) * len(kinds)
    return tuple(sliding and kind is LayerKind.SLIDING for kind in kinds)


def _reduced_vocabulary(reader: ConfigReader) -> int | None:
    """Return how many tokens a draft proposes that has not all of the target's, None where it has."""
    if not reader.has("draft_vocab_size"):
        return None
    reduced, vocab_size = reader.integer("draft_vocab_size"), reader.integer("vocab_size")
    if reduced > vocab_size:
        raise InvalidArgument(
            f"draft config.json: draft_vocab_size is {reduced}; it must be at most vocab_size, {vocab_size}",
            field="draft_vocab_size",
        )
    return None if reduced == vocab_size else reduced


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
    """Return the blocks that a draft without a list was trained on: evenly spread from 1 to the last but two."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(draft_layers))
