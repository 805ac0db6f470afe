"""The DFlash block-diffusion draft (arXiv 2602.06036), which proposes a whole block of draft tokens in one forward.

Its input rows are the embeddings of the known token and of mask tokens. Every layer's keys and values come from the
target's features (`hidden_norm(fc(features))`, the same vector for all layers) for the context and from the layer's
input for the block. The context is projected once, when features arrive; a proposal computes the block's rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.model.config import LayerKind
from services.model.drafts.dflash import DFlashConfig, find_tensors, read_config
from shard_worker.cache.attention_cache import PAGE_ROWS, AttentionCache, AttentionView
from shard_worker.cache.prefix_state import GroupKind, StateView, TensorGroup
from shard_worker.device.devices import Device
from shard_worker.device.dtypes import dtype_from_name
from shard_worker.model.features import Features
from shard_worker.model.kernel_support import can_run
from shard_worker.model.layer_weights import AttentionWeights, DecoderWeights, MlpWeights
from shard_worker.model.layers.swiglu import run as run_mlp
from shard_worker.ops.attention import attend, grouped_mask, visibility
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import apply_rope, inverse_frequencies, rope_table
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.weight import DenseWeight, Weight, concatenate

if TYPE_CHECKING:
    from shard_worker.drafting.runner import DFlashRunner


@dataclass(slots=True)
class DFlashState:
    """One session's context: the keys and values of all layers, those of one kind in one cache.

    caches: by kind of layer. Sliding layers' positions wrap around in window + block slots: enough that a block never
    overwrites what one of its rows can see. layers: each layer's kind and its slot in the cache of that kind. length:
    tokens whose features the context has.
    """

    caches: dict[LayerKind, AttentionCache]
    layers: tuple[tuple[LayerKind, int], ...]
    length: int = 0

    @property
    def size_bytes(self) -> int:
        """Memory that the caches take by now."""
        return sum(cache.size_bytes for cache in self.caches.values())

    def views(self) -> list[StateView]:
        """Return a view of each layer's keys and values, in the order of `DFlashDraft.state_groups`."""
        return [
            AttentionView(self.caches[kind], slice(slot, slot + 1), which)
            for kind, slot in self.layers
            for which in (0, 1)
        ]


@dataclass(frozen=True, slots=True)
class DFlashDraft:
    """A loaded DFlash draft.

    fc: [hidden, N * hidden], over the N captured blocks. hidden_norm, norm: float32 factors of RMSNorms, [hidden].
    context: of each layer the rows of qkv that make keys and values, which alone the context needs. frequencies: RoPE's
    inverse frequencies. The rest is described by `shard_worker.drafting.drafters.Draft`.
    """

    config: DFlashConfig
    device: Device
    dtype: torch.dtype
    fingerprint: str
    weight_bytes: int
    fc: Weight
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    layers: tuple[DecoderWeights, ...]
    context: tuple[Weight, ...]
    frequencies: torch.Tensor

    def allocate(self, max_length: int) -> DFlashState:
        """Return the empty state of a session of up to `max_length` tokens."""
        config, block = self.config, self.config.block_size
        like = torch.empty(0, dtype=self.dtype, device=self.device.torch_device)
        caches: dict[LayerKind, AttentionCache] = {}
        kinds = config.layer_kinds
        for kind in set(kinds):
            ring = self.ring if kind is LayerKind.SLIDING else None
            caches[kind] = AttentionCache(
                kinds.count(kind),
                config.kv_heads,
                max_length + block,
                config.head_dim,
                like,
                PAGE_ROWS if self.device.is_gpu else None,
                None if ring is None or ring > max_length + block else ring,
            )
        return DFlashState(caches, tuple(zip(kinds, self.slots, strict=True)))

    @property
    def slots(self) -> tuple[int, ...]:
        """Each layer's slot in the cache of its kind."""
        kinds = self.config.layer_kinds
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))

    @property
    def ring(self) -> int | None:
        """Token slots of a sliding layer, None without one.

        On a GPU these are whole pages, with room for a step's rows that do not count after all.
        """
        window, block = self.config.window, self.config.block_size
        if window is None:
            return None
        if not self.device.is_gpu:
            return window + block
        return -(-(window + 2 * block) // PAGE_ROWS) * PAGE_ROWS

    def state_groups(self) -> tuple[TensorGroup, ...]:
        """Return what a snapshot holds: each layer's keys and values, a sliding one's as far as it looks back."""
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

    def mix(self, features: Features) -> torch.Tensor:
        """Return `fc(features)` of n rows, [n, hidden]."""
        if features.total is not None:
            return features.total.to(self.device.torch_device, self.dtype)
        pieces = [features.slices[index] for index in range(len(self.config.capture_layers))]
        joined = torch.cat([piece.to(self.device.torch_device) for piece in pieces], -1)
        return self.fc.matmul(joined.to(self.dtype))

    def combine(self, features: Features) -> torch.Tensor:
        """Return the context vector of each of n rows, [n, hidden]: `hidden_norm(fc(features))`."""
        return rms_norm(self.mix(features), self.hidden_norm, self.config.norm_eps)

    def append(self, state: DFlashState, features: Features) -> None:
        """Take the features of the n committed rows that follow the context."""
        context = self.combine(features)
        count, config = len(context), self.config
        positions = torch.arange(state.length, state.length + count, device=context.device)
        rope = rope_table(positions, self.frequencies, self.dtype)
        queries = config.heads * config.head_dim
        for (kind, slot), weights, keys_and_values in zip(state.layers, self.layers, self.context, strict=True):
            mixer = weights.mixer
            assert isinstance(mixer, AttentionWeights)
            bias = None if mixer.qkv_bias is None else mixer.qkv_bias[queries:]
            projected = keys_and_values.matmul(context, bias).view(count, 2, config.kv_heads, -1)
            keys = apply_rope(rms_norm(projected[:, 0], mixer.qk_norm[config.heads :], config.norm_eps), rope)
            # Only the last `slots` rows: earlier ones would be overwritten.
            cache = state.caches[kind]
            first = max(0, count - cache.slots)
            cache.store(slot, state.length + first, keys[first:], projected[first:, 1])
        state.length += count

    def propose(self, state: DFlashState, embedded: torch.Tensor, draft_tokens: int) -> torch.Tensor:
        """Return the hidden rows of the draft tokens after the context, normed for lm_head: [draft_tokens, hidden].

        embedded: the target's embedding rows of the known token, at position `state.length`, and of the mask token,
        [2, hidden]. The context is left as it was.
        """
        config, rows = self.config, draft_tokens + 1
        index = torch.tensor([0] + [1] * draft_tokens, device=self.device.torch_device)
        hidden = embedded.to(self.device.torch_device, self.dtype)[index]
        end = state.length + rows
        positions = torch.arange(state.length, end, device=hidden.device)
        rope = rope_table(positions, self.frequencies, self.dtype)
        masks: dict[tuple[LayerKind, bool], torch.Tensor | None] = {}
        for (kind, slot), causal, weights in zip(state.layers, config.causal, self.layers, strict=True):
            mixer, cache = weights.mixer, state.caches[kind]
            assert isinstance(mixer, AttentionWeights)
            x = rms_norm(hidden, weights.input_norm, config.norm_eps)
            projected = mixer.qkv.matmul(x, mixer.qkv_bias).view(rows, -1, config.head_dim)
            normed = rms_norm(projected[:, : config.heads + config.kv_heads], mixer.qk_norm, config.norm_eps)
            rotated = apply_rope(normed, rope)
            values = projected[:, config.heads + config.kv_heads :]
            cache.store(slot, state.length, rotated[:, config.heads :], values)
            span = min(cache.slots, end)
            if (kind, causal) not in masks:
                masks[kind, causal] = self._mask(kind, causal, positions, end, span, cache.slots)
            mixed = attend(rotated[:, : config.heads], *cache.span(slot, span), masks[kind, causal])
            hidden = hidden + mixer.out.matmul(mixed, mixer.out_bias)
            normed = rms_norm(hidden, weights.post_norm, config.norm_eps)
            hidden = hidden + run_mlp(weights.mlp, normed)
        return rms_norm(hidden[1:], self.norm, config.norm_eps)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can run this draft on its device."""
        return can_run(self.device, [self.config.head_dim])

    def make_runner(self, head: Weight, *, graphs: bool) -> DFlashRunner:
        """Return a runner of this draft with an lm_head [vocab, hidden]. graphs: as captured CUDA graphs."""
        # Only where kernels can run is Triton installed.
        from shard_worker.drafting.runner import DFlashRunner

        return DFlashRunner(self, head, graphs=graphs)

    def _mask(
        self, kind: LayerKind, causal: bool, positions: torch.Tensor, end: int, span: int, slots: int
    ) -> torch.Tensor | None:
        """Return what each row of a block may not see, None where it may see everything.

        Each of the first `span` slots holds the latest position below `end` that maps to it; a negative position means
        that the slot is empty.
        """
        window = self.config.window if kind is LayerKind.SLIDING else None
        if not causal and (window is None or end <= window):
            return None
        slot = torch.arange(span, device=positions.device)
        slot_positions = end - 1 - torch.remainder(end - 1 - slot, slots)
        seen = visibility(positions, slot_positions, causal=causal, window=window)
        return grouped_mask(seen, self.config.heads // self.config.kv_heads, self.dtype)


def load(
    checkpoint: Checkpoint,
    device: Device,
    dtype: str | None,
    on_progress: Callable[[int, int], None],
) -> DFlashDraft:
    """Load a draft. dtype: None keeps the checkpoint's own; norms keep theirs.

    Raises InvalidArgument for missing, unknown or mis-shaped tensors, Unimplemented for other draft formats.
    """
    config = read_config(checkpoint.config)
    names = find_tensors(config, checkpoint.headers, checkpoint.directory)
    total = sum(checkpoint.size_bytes(name) for name in names.values())
    chosen_dtype = checkpoint.dtype(names["fc.weight"]) if dtype is None else dtype_from_name(dtype)
    loaded = resident = 0

    def read(name: str) -> torch.Tensor:
        nonlocal loaded, resident
        stored = names[name]
        loaded += checkpoint.size_bytes(stored)
        on_progress(loaded, total)
        tensor_dtype = checkpoint.dtype(stored) if name.endswith("norm.weight") else chosen_dtype
        tensor = checkpoint.place(stored, device.torch_device, tensor_dtype)
        resident += tensor.nbytes
        return tensor

    def pack(index: int, kind: LayerKind) -> tuple[DecoderWeights, Weight]:
        prefix = f"layers.{index}."
        attention = f"{prefix}self_attn."

        def matrices(*parts: str) -> Weight:
            return concatenate([DenseWeight(read(f"{prefix}{part}_proj.weight")) for part in parts])

        norms = [(read(f"{attention}{part}_norm.weight").float(), heads) for part, heads in heads_of]
        qkv = matrices("self_attn.q", "self_attn.k", "self_attn.v")
        layer = DecoderWeights(
            kind=kind,
            input_norm=read(f"{prefix}input_layernorm.weight").float(),
            mixer=AttentionWeights(
                qkv=qkv.prepared(),
                qkv_bias=torch.cat([read(f"{attention}{part}_proj.bias") for part in "qkv"])
                if config.attention_bias
                else None,
                qk_norm=torch.cat([norm.expand(heads, -1) for norm, heads in norms]).contiguous(),
                out=matrices("self_attn.o").prepared(),
                out_bias=read(f"{attention}o_proj.bias") if config.attention_bias else None,
                gated=False,
            ),
            post_norm=read(f"{prefix}post_attention_layernorm.weight").float(),
            mlp=MlpWeights(
                matrices("mlp.gate", "mlp.up").prepared(),
                matrices("mlp.down").prepared(),
            ),
        )
        return layer, qkv.select_rows(slice(config.heads * config.head_dim, None)).prepared()

    heads_of = (("q", config.heads), ("k", config.kv_heads))
    layers, context = zip(*[pack(index, kind) for index, kind in enumerate(config.layer_kinds)], strict=True)
    return DFlashDraft(
        config=config,
        device=device,
        dtype=chosen_dtype,
        fingerprint=checkpoint.fingerprint,
        fc=DenseWeight(read("fc.weight")).prepared(),
        hidden_norm=read("hidden_norm.weight").float(),
        norm=read("norm.weight").float(),
        layers=layers,
        context=context,
        frequencies=inverse_frequencies(config.head_dim, config.rope_theta, device.torch_device),
        # Last: it counts what is read above.
        weight_bytes=resident,
    )


def read_fc(checkpoint: Checkpoint) -> tuple[DFlashConfig, torch.Tensor]:
    """Read what a target stage needs of a draft: its config, and `fc` [hidden, N * hidden] over the mapped file."""
    config = read_config(checkpoint.config)
    return config, checkpoint.tensor(find_tensors(config, checkpoint.headers, checkpoint.directory)["fc.weight"])
