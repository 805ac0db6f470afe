"""DFlash block-diffusion draft (arXiv 2602.06036): guesses a whole block in one forward.

Input rows: the known token's embedding and mask tokens. Every layer's keys and values come from the target's features
(`hidden_norm(fc(features))`, the same vector for all layers) for the context and from the layer's input for the block.
The context is projected once, when features arrive; a propose runs the block's rows only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.errors import InvalidArgument
from shard_worker.checkpoint import Checkpoint
from shard_worker.device import Device
from shard_worker.draft_config import DraftConfig, read_draft_config
from shard_worker.dtypes import dtype_from_name
from shard_worker.features import Features
from shard_worker.layers.mlp import MlpWeights, run as run_mlp
from shard_worker.model_config import LayerKind
from shard_worker.ops.attention import attend, grouped_mask, visibility
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import apply_rope, inverse_frequencies, rope_table
from shard_worker.prefix_state import GroupKind, RingView, StateView, TensorGroup

_ALIASES = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
)
# Copies of the target's own tensors, which are shared instead, and maps that a full vocabulary doesn't need.
_IGNORED = re.compile(r"^(embed_tokens\.weight|lm_head\.weight|t2d|verifier_.*|.*rotary_emb\.inv_freq)$")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One draft layer. query: [heads * dim, hidden]; norms float32."""

    input_norm: torch.Tensor
    query: torch.Tensor
    query_bias: torch.Tensor | None
    query_norm: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    mlp: MlpWeights


@dataclass(slots=True)
class DraftState:
    """One session's context: keys and values of every layer, [kv_heads, slots, dim]; slot = position modulo slots.

    A sliding layer has window + block slots: enough that a block never overwrites what one of its rows can see.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def views(self) -> list[StateView]:
        """In the order of `Draft.state_groups`."""
        return [RingView(tensor) for pair in zip(self.keys, self.values, strict=True) for tensor in pair]


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft. key_value: all layers' k and v rows, [layers * 2 * kv_heads * dim, hidden], for one product."""

    config: DraftConfig
    device: Device
    dtype: torch.dtype
    fingerprint: str
    weight_bytes: int
    fc: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    key_value: torch.Tensor
    key_value_bias: torch.Tensor | None
    key_norm: torch.Tensor
    frequencies: torch.Tensor

    def allocate(self, max_length: int) -> DraftState:
        """Memory for one session of up to `max_length` tokens."""
        config, block = self.config, self.config.block_size
        keys, values = [], []
        for kind in config.layer_kinds:
            slots = max_length + block
            if kind is LayerKind.SLIDING and config.window is not None:
                slots = min(slots, config.window + block)
            shape = (config.kv_heads, slots, config.head_dim)
            keys.append(torch.zeros(shape, dtype=self.dtype, device=self.device.torch_device))
            values.append(torch.zeros_like(keys[-1]))
        return DraftState(keys, values)

    def state_groups(self) -> tuple[TensorGroup, ...]:
        """What is kept of a prefix: each layer's keys and values, a sliding one's only as far as it looks back."""
        config = self.config
        extents = (config.kv_heads, config.head_dim)
        return tuple(
            TensorGroup(
                GroupKind.ROWS,
                (f"draft.layers.{layer}.{what}",),
                extents,
                self.dtype,
                config.window if kind is LayerKind.SLIDING else None,
            )
            for layer, kind in enumerate(config.layer_kinds)
            for what in ("k", "v")
        )

    def combine(self, features: Features) -> torch.Tensor:
        """Features of n rows -> the context vector of each, [n, hidden]: `hidden_norm(fc(features))`."""
        if features.total is not None:
            mixed = features.total.to(self.device.torch_device, self.dtype)
        else:
            pieces = [features.slices[index] for index in range(len(self.config.capture_layers))]
            joined = torch.cat([piece.to(self.device.torch_device) for piece in pieces], -1)
            mixed = F.linear(joined.to(self.dtype), self.fc)
        return rms_norm(mixed, self.hidden_norm, self.config.norm_eps)

    def append(self, state: DraftState, features: Features) -> None:
        """Take features of the n committed rows that follow the context."""
        context = self.combine(features)
        count, config = len(context), self.config
        positions = torch.arange(state.length, state.length + count, device=context.device)
        projected = F.linear(context, self.key_value, self.key_value_bias)
        projected = projected.view(count, config.num_layers, 2, config.kv_heads, config.head_dim)
        keys = rms_norm(projected[:, :, 0], self.key_norm, config.norm_eps)
        keys = apply_rope(
            keys.reshape(count, -1, config.head_dim),
            rope_table(positions, self.frequencies, self.dtype),
        ).view(count, config.num_layers, config.kv_heads, config.head_dim)
        for layer in range(config.num_layers):
            slots = state.keys[layer].shape[1]
            # Only the last `slots` rows: earlier ones would be overwritten, in no particular order.
            tail = slice(max(0, count - slots), count)
            _store(state, layer, positions[tail], keys[tail, layer], projected[tail, layer, 1])
        state.length += count

    def propose(self, state: DraftState, embedded: torch.Tensor, guesses: int) -> torch.Tensor:
        """Hidden rows of the guesses after the context, normed for the target's lm_head: [guesses, hidden].

        embedded: target embedding rows of the known token, at position `state.length`, and of the mask token,
        [2, hidden]. The context cache is left as it was.
        """
        config, rows = self.config, guesses + 1
        index = torch.tensor([0] + [1] * guesses, device=self.device.torch_device)
        hidden = embedded.to(self.device.torch_device, self.dtype)[index]
        end = state.length + rows
        positions = torch.arange(state.length, end, device=hidden.device)
        rope = rope_table(positions, self.frequencies, self.dtype)
        masks: dict[tuple[LayerKind, bool], torch.Tensor | None] = {}
        per_layer = 2 * config.kv_heads * config.head_dim
        for index_, weights in enumerate(self.layers):
            x = rms_norm(hidden, weights.input_norm, config.norm_eps)
            queries = F.linear(x, weights.query, weights.query_bias).view(rows, config.heads, -1)
            part = slice(index_ * per_layer, (index_ + 1) * per_layer)
            bias = None if self.key_value_bias is None else self.key_value_bias[part]
            key_value = F.linear(x, self.key_value[part], bias).view(rows, 2, config.kv_heads, -1)
            queries = apply_rope(rms_norm(queries, weights.query_norm, config.norm_eps), rope)
            keys = apply_rope(rms_norm(key_value[:, 0], self.key_norm[index_], config.norm_eps), rope)
            _store(state, index_, positions, keys, key_value[:, 1])

            kind = (config.layer_kinds[index_], config.causal[index_])
            span = state.keys[index_].shape[1]
            if not self.device.is_gpu:
                span = min(span, end)
            if kind not in masks:
                masks[kind] = self._mask(kind, positions, end, span, state.keys[index_].shape[1])
            mixed = attend(queries, state.keys[index_][:, :span], state.values[index_][:, :span], masks[kind])
            hidden = hidden + F.linear(mixed, weights.out, weights.out_bias)
            normed = rms_norm(hidden, weights.post_norm, config.norm_eps)
            hidden = hidden + run_mlp(weights.mlp, normed)
        return rms_norm(hidden[1:], self.norm, config.norm_eps)

    def _mask(
        self, kind: tuple[LayerKind, bool], positions: torch.Tensor, end: int, span: int, slots: int
    ) -> torch.Tensor | None:
        """Slots hold the latest position below `end` that maps to them; a negative one means empty."""
        sliding, causal = kind[0] is LayerKind.SLIDING, kind[1]
        window = self.config.window if sliding else None
        if not causal and span == end and (window is None or end <= window):
            return None
        slot = torch.arange(span, device=positions.device)
        held = end - 1 - torch.remainder(end - 1 - slot, slots)
        seen = visibility(positions, held, causal=causal, window=window)
        return grouped_mask(seen, self.config.heads // self.config.kv_heads, self.dtype)


def _store(state: DraftState, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    slots = torch.remainder(positions, state.keys[layer].shape[1])
    state.keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
    state.values[layer].index_copy_(1, slots, values.transpose(0, 1))


def load(
    checkpoint: Checkpoint,
    device: Device,
    dtype: str | None,
    on_progress: Callable[[int, int], None],
) -> Draft:
    """Raises InvalidArgument for missing, unknown or mis-shaped tensors, Unimplemented for other draft formats."""
    config = read_draft_config(checkpoint.config)
    names = _names(checkpoint, config)
    total = sum(checkpoint.size_bytes(name) for name in names.values())
    wanted = checkpoint.tensor(names["fc.weight"]).dtype if dtype is None else dtype_from_name(dtype)
    loaded = resident = 0

    def take(name: str) -> torch.Tensor:
        nonlocal loaded, resident
        stored = checkpoint.tensor(names[name])
        loaded += checkpoint.size_bytes(names[name])
        on_progress(loaded, total)
        kept = stored.dtype if stored.ndim == 1 and name.endswith("norm.weight") else wanted
        tensor = stored.to(device=device.torch_device, dtype=kept, copy=True)
        resident += tensor.nbytes
        return tensor

    def bias(name: str) -> torch.Tensor | None:
        return take(name) if config.attention_bias else None

    layers, key_value, key_value_bias, key_norms = [], [], [], []
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        attention = f"{prefix}self_attn."
        gate_up = torch.cat((take(f"{prefix}mlp.gate_proj.weight"), take(f"{prefix}mlp.up_proj.weight")))
        layers.append(
            LayerWeights(
                input_norm=take(f"{prefix}input_layernorm.weight").float(),
                query=take(f"{attention}q_proj.weight"),
                query_bias=bias(f"{attention}q_proj.bias"),
                query_norm=take(f"{attention}q_norm.weight").float(),
                out=take(f"{attention}o_proj.weight"),
                out_bias=bias(f"{attention}o_proj.bias"),
                post_norm=take(f"{prefix}post_attention_layernorm.weight").float(),
                mlp=MlpWeights(gate_up, take(f"{prefix}mlp.down_proj.weight")),
            )
        )
        key_value += [take(f"{attention}{part}_proj.weight") for part in "kv"]
        if config.attention_bias:
            key_value_bias += [take(f"{attention}{part}_proj.bias") for part in "kv"]
        key_norms.append(take(f"{attention}k_norm.weight").float())
    return Draft(
        config=config,
        device=device,
        dtype=wanted,
        fingerprint=checkpoint.fingerprint,
        fc=take("fc.weight"),
        hidden_norm=take("hidden_norm.weight").float(),
        norm=take("norm.weight").float(),
        layers=tuple(layers),
        key_value=torch.cat(key_value),
        key_value_bias=torch.cat(key_value_bias) if key_value_bias else None,
        key_norm=torch.stack(key_norms)[:, None],
        frequencies=inverse_frequencies(config.head_dim, config.rope_theta, device.torch_device),
        # Last: it counts what is taken above.
        weight_bytes=resident,
    )


def read_fc(checkpoint: Checkpoint) -> tuple[DraftConfig, torch.Tensor]:
    """What a target stage needs of a draft: its configuration and `fc` [hidden, N * hidden], over the mapped file."""
    config = read_draft_config(checkpoint.config)
    return config, checkpoint.tensor(_names(checkpoint, config)["fc.weight"])


def _names(checkpoint: Checkpoint, config: DraftConfig) -> dict[str, str]:
    """Canonical name -> name in the checkpoint, every tensor checked."""
    names: dict[str, str] = {}
    for stored in checkpoint.names:
        name = stored
        for pattern, plain in _ALIASES:
            name = pattern.sub(plain, name)
        if not _IGNORED.match(name):
            names[name] = stored
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in names:
            raise InvalidArgument(
                f"draft tensor {name} is missing in {checkpoint.directory}",
                reason="TENSOR_MISSING",
                field=name,
            )
        found = checkpoint.shape(names[name])
        if found != shape:
            raise InvalidArgument(
                f"draft tensor {name} has shape {list(found)}, config.json asks for {list(shape)}",
                reason="TENSOR_SHAPE",
                field=name,
            )
    unknown = sorted(set(names) - set(expected))
    if unknown:
        raise InvalidArgument(
            f"draft tensor {unknown[0]} is not one that a DFlash draft has ({len(unknown)} such tensors): "
            "the checkpoint is of another draft format",
            field=unknown[0],
        )
    return names


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config.hidden_size, config.mlp_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        # The draft reads the target's embedding rows, so both have one hidden size.
        "fc.weight": (hidden, len(config.capture_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
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
        if config.attention_bias:
            extents = {"q": queries, "k": keys, "v": keys, "o": hidden}
            shapes |= {f"{attention}{part}_proj.bias": (size,) for part, size in extents.items()}
    return shapes
