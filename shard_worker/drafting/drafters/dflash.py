"""The DFlash block-diffusion draft (arXiv 2602.06036), which proposes a whole block of draft tokens in one forward.

Its input rows are the embeddings of the known token and of mask tokens. Every layer's keys and values come from the
target's features (`hidden_norm(fc(features))`, the same vector for all layers) for the context and from the layer's
input for the block. The context is projected once, when features arrive; a proposal computes the block's rows alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from services.errors import InvalidArgument, Unimplemented
from services.model.cached_tensors import PAGE_ROWS
from services.model.config import LayerKind
from services.model.draft_tensors import draft_bytes
from services.model.drafts import draft_dtype
from services.model.drafts.dflash import (
    TOKEN_OFFSETS,
    DFlashConfig,
    find_tensors,
    is_multiplied_apart,
    read_config,
)
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.page_pool import PagePool
from shard_worker.cache.prefix_state import GroupKind, StateView, TensorGroup
from shard_worker.device.devices import Device, check_room
from shard_worker.device.dtypes import dtype_from_name, dtype_to_name
from shard_worker.drafting import choosers
from shard_worker.drafting.block_convolution import around, earlier_rows
from shard_worker.drafting.choosers import Chooser
from shard_worker.drafting.choosers.dflash2 import MOST_RANK, Selector
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.model.features import Features
from shard_worker.model.kernel_support import can_read, can_run, log_missing
from shard_worker.model.layer_weights import (
    AttentionWeights,
    BlockConvolution,
    DecoderWeights,
    LayerTensors,
    LoadedWhenAsked,
    MlpWeights,
    SublayerConvolutions,
    matrices_of,
)
from shard_worker.model.layers.swiglu import run as run_mlp
from shard_worker.model.rows import Rows, rope_of_rows
from shard_worker.ops.attention import attend, first_seen, grouped_mask, visibility
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import Rotation, apply_rope
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.weight import DenseWeight, Weight, concatenate

if TYPE_CHECKING:
    from shard_worker.drafting.runner import DFlashRunner


@dataclass(slots=True)
class DFlashState:
    """One session's context: the keys and values of all layers, those of one kind in one cache.

    caches: by kind of layer. layers: each layer's kind and its slot in the cache of that kind. length: tokens whose
    features the context has. batch_invariant_rows: as in `Rows`.
    """

    caches: dict[LayerKind, AttentionCache]
    layers: tuple[tuple[LayerKind, int], ...]
    length: int = 0
    batch_invariant_rows: int | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that the caches take by now."""
        return sum(cache.size_bytes for cache in self.caches.values())

    @property
    def shortest(self) -> int:
        """The fewest tokens that it can be cut to."""
        return max(cache.shortest for cache in self.caches.values())

    def views(self) -> list[StateView]:
        """Return a view of each layer's keys and values, in the order of `DFlashDraft.state_groups`."""
        return [
            AttentionView(self.caches[kind], slice(slot, slot + 1), which)
            for kind, slot in self.layers
            for which in (0, 1)
        ]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The rows of several sessions' blocks in one proposal, one session's behind the other's.

    states: their contexts, which the blocks follow. counts: how many rows each has. places: where these are. rows: what
    layers see of them. earlier: as of `earlier_rows`, none without convolutions. masks: by session and kind of layer,
    what its rows may not see, for those that were asked for.
    """

    states: Sequence[DFlashState]
    counts: Sequence[int]
    places: Sequence[slice]
    rows: Rows
    earlier: Sequence[torch.Tensor]
    masks: dict[tuple[int, LayerKind, bool], torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DFlashDraft:
    """A loaded DFlash draft.

    fc: [hidden, N * hidden], over the N captured blocks. hidden_norm, norm: float32 factors of RMSNorms, [hidden].
    context: of each layer the rows of qkv that make keys and values, which alone the context needs. rotation: RoPE's.
    pool: where its sessions' pages come from. The rest is described by `shard_worker.drafting.drafters.Draft`.
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
    rotation: Rotation
    pool: PagePool
    chooser: Chooser | None
    own_head: DraftHead | None

    def allocate(self, max_length: int, batch_invariant_rows: int | None = None) -> DFlashState:
        """Return the empty state of a session of up to `max_length` tokens. batch_invariant_rows: as in `Rows`."""
        config, block = self.config, self.config.block_size
        like = torch.empty(0, dtype=self.dtype, device=self.device.torch_device)
        caches: dict[LayerKind, AttentionCache] = {}
        kinds = config.layer_kinds
        for kind in set(kinds):
            caches[kind] = AttentionCache(
                kinds.count(kind),
                config.kv_heads,
                max_length + block,
                config.head_dim,
                like,
                PAGE_ROWS if self.device.is_gpu else None,
                config.window if kind is LayerKind.SLIDING else None,
                pool=self.pool,
            )
        layers = tuple(zip(kinds, self.slots, strict=True))
        return DFlashState(caches, layers, batch_invariant_rows=batch_invariant_rows)

    @property
    def slots(self) -> tuple[int, ...]:
        """Each layer's slot in the cache of its kind."""
        kinds = self.config.layer_kinds
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))

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

    def mix(self, features: Features, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Return `fc(features)` of n rows, [n, hidden]. batch_invariant_rows: as in `Rows`."""
        if features.total is not None:
            return features.total.to(self.device.torch_device, self.dtype)
        pieces = [features.slices[index] for index in range(len(self.config.capture_layers))]
        joined = torch.cat([piece.to(self.device.torch_device) for piece in pieces], -1)
        return self.fc.matmul(joined.to(self.dtype), None, batch_invariant_rows)

    def combine(self, features: Features, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Return the context vector of each of n rows, [n, hidden]: `hidden_norm(fc(features))`."""
        return rms_norm(self.mix(features, batch_invariant_rows), self.hidden_norm, self.config.norm_eps)

    def append(self, states: Sequence[DFlashState], counts: Sequence[int], features: Features) -> None:
        """Take the features of the committed rows that follow the contexts, as `Draft.append`."""
        config, fixed_rows = self.config, states[0].batch_invariant_rows
        context = self.combine(features, fixed_rows)
        rope = self._rope([(state.length, count) for state, count in zip(states, counts, strict=True)], fixed_rows)
        queries, places = config.heads * config.head_dim, _places(counts)
        for layer, ((kind, slot), weights) in enumerate(zip(states[0].layers, self.layers, strict=True)):
            mixer = weights.mixer
            assert isinstance(mixer, AttentionWeights)
            assert mixer.qk_norm is not None
            bias = None if mixer.qkv_bias is None else mixer.qkv_bias[queries:]
            projected = self.context[layer].matmul(context, bias, fixed_rows).view(len(context), 2, config.kv_heads, -1)
            keys = apply_rope(rms_norm(projected[:, 0], mixer.qk_norm[config.heads :], config.norm_eps), rope)
            for state, own in zip(states, places, strict=True):
                # Of many rows only those that a block may see.
                cache = state.caches[kind]
                cache.free_unseen(state.length + own.stop - own.start)
                skipped = max(0, cache.first - state.length)
                kept = slice(own.start + skipped, own.stop)
                cache.store(slot, state.length + skipped, keys[kept], projected[kept, 1])
        for state, count in zip(states, counts, strict=True):
            state.length += count

    def propose(
        self, states: Sequence[DFlashState], embedded: torch.Tensor, draft_tokens: Sequence[int]
    ) -> torch.Tensor:
        """Return the hidden rows of all draft tokens, as `Draft.propose`."""
        config, fixed_rows = self.config, states[0].batch_invariant_rows
        counts = [tokens if config.from_anchor else tokens + 1 for tokens in draft_tokens]
        places, mask = _places(counts), len(states)
        index = [row for known, count in enumerate(counts) for row in (known, *[mask] * (count - 1))]
        device = self.device.torch_device
        hidden = embedded.to(device, self.dtype)[torch.tensor(index, device=device)]
        rope = self._rope([(state.length, count) for state, count in zip(states, counts, strict=True)], fixed_rows)
        rows = Rows((), {config.rope: rope}, batch_invariant_rows=fixed_rows)
        taps = 0 if config.convolution is None else config.convolution.taps
        blocks = Blocks(states, counts, places, rows, earlier_rows(counts, taps, device))
        for layer, weights in enumerate(self.layers):
            assert isinstance(weights.mlp, MlpWeights)
            attention = functools.partial(self._attention, layer, blocks)
            mlp = functools.partial(run_mlp, weights.mlp, rows=rows)
            x = rms_norm(hidden, weights.input_norm, config.norm_eps)
            if weights.convolutions is None:
                hidden = hidden + attention(x)
            else:
                hidden = hidden + around(weights.convolutions.attention, attention, x, blocks.earlier, fixed_rows)
            x = rms_norm(hidden, weights.post_norm, config.norm_eps)
            if weights.convolutions is None:
                hidden = hidden + mlp(x)
            else:
                hidden = hidden + around(weights.convolutions.mlp, mlp, x, blocks.earlier, fixed_rows)
        guessed = [row for row, known in enumerate(index) if config.from_anchor or known == mask]
        return rms_norm(hidden[torch.tensor(guessed, device=device)], self.norm, config.norm_eps)

    def _attention(self, layer: int, blocks: Blocks, x: torch.Tensor) -> torch.Tensor:
        """Return what a layer's attention makes of its normed input, the rows x [n, hidden] of all blocks."""
        config, mixer, fixed_rows = self.config, self.layers[layer].mixer, blocks.rows.batch_invariant_rows
        (kind, slot), causal = blocks.states[0].layers[layer], config.causal[layer]
        assert isinstance(mixer, AttentionWeights)
        assert mixer.qk_norm is not None
        projected = mixer.qkv.matmul(x, mixer.qkv_bias, fixed_rows).view(len(x), -1, config.head_dim)
        normed = rms_norm(projected[:, : config.heads + config.kv_heads], mixer.qk_norm, config.norm_eps)
        rotated = apply_rope(normed, blocks.rows.ropes[config.rope])
        values = projected[:, config.heads + config.kv_heads :]
        mixed = []
        for number, (state, own) in enumerate(zip(blocks.states, blocks.places, strict=True)):
            cache, end = state.caches[kind], state.length + blocks.counts[number]
            cache.store(slot, state.length, rotated[own, config.heads :], values[own])
            first = first_seen(state.length, cache.window)
            if (number, kind, causal) not in blocks.masks:
                blocks.masks[number, kind, causal] = self._mask(cache.window, causal, first, state.length, end)
            seen = blocks.masks[number, kind, causal]
            mixed.append(attend(rotated[own, : config.heads], *cache.span(slot, first, end), seen))
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return mixer.out.matmul(together, mixer.out_bias, fixed_rows)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can run this draft on its device."""
        matrices = [matrix for weights in self.layers for matrix in matrices_of(weights)]
        matrices.append(self.fc)
        if self.chooser is not None:
            matrices += self.chooser.multiplied
        if not can_run(self.device, [self.config.head_dim]) or not can_read(self.device, matrices):
            return False
        if isinstance(self.chooser, Selector) and not self.chooser.fits_kernels:
            log_missing(self.device, f"selectors of more than {MOST_RANK} numbers a token")
            return False
        return True

    def make_runner(self, head: DraftHead, *, graphs: bool, sessions: int | None = None) -> DFlashRunner:
        """Return a runner of this draft, as `Draft.make_runner`."""
        # Only where kernels can run is Triton installed.
        from shard_worker.drafting.runner import DFlashRunner

        return DFlashRunner(self, head, graphs=graphs, sessions=sessions)

    def _rope(
        self, rows: Sequence[tuple[int, int]], batch_invariant_rows: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary table of sessions' rows: of each the first one's position, and how many there are."""
        device = self.device.torch_device
        positions = [torch.arange(first, first + count, device=device) for first, count in rows]
        return rope_of_rows(positions, self.rotation, self.dtype, batch_invariant_rows)

    def _mask(self, window: int | None, causal: bool, first: int, base: int, end: int) -> torch.Tensor | None:
        """Return what each row of a session's block [base, end) may not see of positions [first, end), None where it
        may see everything."""
        if not causal and (window is None or end <= window):
            return None
        positions = torch.arange(first, end, device=self.device.torch_device)
        seen = visibility(positions[base - first :], positions, causal=causal, window=window)
        return grouped_mask(seen, self.config.heads // self.config.kv_heads, self.dtype)


def _places(counts: Sequence[int]) -> list[slice]:
    """Return where each session's rows are among those of all, one session's behind the other's."""
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def load(
    checkpoint: Checkpoint,
    device: Device,
    dtype: str | None,
    on_progress: Callable[[int, int], None],
    pool: PagePool | None = None,
    *,
    projected: bool = False,
) -> DFlashDraft:
    """Load a draft. dtype: None keeps the checkpoint's own; norms keep theirs. pool: where its sessions' pages come
    from, None for one without a bound. projected: as of `DraftKind.load`.

    Raises InvalidArgument for missing, unknown or mis-shaped tensors, Unimplemented for other draft formats.
    """
    config = read_config(checkpoint.config)
    names = find_tensors(config, checkpoint.headers, checkpoint.directory)
    chooses = not projected or config.draft_vocab_size is not None
    if chooses and projected and config.chooser.needs_embedding:
        raise Unimplemented(
            f"a {config.layout} draft with an lm_head of its own chooses tokens by the target's embedding too, "
            "which its worker has with --draft-head loaded only",
            field="--draft-head",
        )
    if not chooses:
        names = {name: stored for name, stored in names.items() if name not in config.chooser_shapes}
    total = sum(checkpoint.size_bytes(name) for name in names.values())
    chosen_dtype = dtype_from_name(
        draft_dtype(checkpoint.config, names, checkpoint.headers) if dtype is None else dtype
    )
    word = dtype_to_name(chosen_dtype)
    on_cpu = device.torch_device.type == "cpu"
    needed = draft_bytes(names, checkpoint.headers, word, is_multiplied_apart, on_cpu=on_cpu)
    check_room(device, needed, "the draft's weights")
    loaded = resident = 0

    def count(stored: str, nbytes: int) -> None:
        nonlocal loaded, resident
        loaded += checkpoint.size_bytes(stored)
        resident += nbytes
        on_progress(loaded, total)

    def read(name: str) -> torch.Tensor:
        stored = names[name]
        tensor_dtype = checkpoint.dtype(stored) if name.endswith("norm.weight") else chosen_dtype
        tensor = checkpoint.place(stored, device.torch_device, tensor_dtype)
        count(stored, tensor.nbytes)
        return tensor

    def matrix(name: str) -> Weight:
        weight = checkpoint.weight(names[name], device.torch_device, chosen_dtype)
        count(names[name], weight.nbytes)
        return weight

    def pack(index: int, kind: LayerKind) -> tuple[DecoderWeights, Weight]:
        nonlocal resident
        prefix = f"layers.{index}."
        attention = f"{prefix}self_attn."

        def matrices(*parts: str) -> Weight:
            return concatenate([matrix(f"{prefix}{part}_proj.weight") for part in parts])

        norms = [(read(f"{attention}{part}_norm.weight").float(), heads) for part, heads in heads_of]
        qkv = matrices("self_attn.q", "self_attn.k", "self_attn.v")
        layer = DecoderWeights(
            kind=kind,
            input_norm=read(f"{prefix}input_layernorm.weight").float(),
            mixer=AttentionWeights(
                shape=config.attention(index),
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
            convolutions=convolutions(index),
        )
        context = qkv.select_rows(slice(config.heads * config.head_dim, None)).prepared()
        if not isinstance(context, DenseWeight):
            # Rows of a dense matrix are a view, those of all others take memory of their own.
            resident += context.nbytes
        return layer, context

    def convolutions(index: int) -> SublayerConvolutions | None:
        if config.convolution is None:
            return None
        attention, mlp = (
            BlockConvolution(
                read(f"layers.{index}.{sublayer}_conv.base_kernel").float(),
                matrix(f"layers.{index}.{sublayer}_conv.kernel_projection.weight").prepared(),
            )
            for sublayer in ("attention", "mlp")
        )
        return SublayerConvolutions(attention, mlp)

    def own_head() -> DraftHead | None:
        if config.draft_vocab_size is None:
            return None
        assert chooser is not None
        rows = torch.arange(config.draft_vocab_size)
        token_ids = rows + checkpoint.tensor(TOKEN_OFFSETS)
        least, most = int(token_ids.min()), int(token_ids.max())
        if least < 0 or most >= config.vocab_size:
            raise InvalidArgument(
                f"draft tensor {TOKEN_OFFSETS} leads to tokens {least} to {most}; those of the target are below "
                f"{config.vocab_size}",
                field=TOKEN_OFFSETS,
            )
        return DraftHead(matrix("lm_head.weight").prepared(), token_ids.to(device.torch_device), chooser)

    heads_of = (("q", config.heads), ("k", config.kv_heads))
    chooser = _make_chooser(config, matrix, read) if chooses else None
    layers, context = zip(*[pack(index, kind) for index, kind in enumerate(config.layer_kinds)], strict=True)
    return DFlashDraft(
        config=config,
        device=device,
        dtype=chosen_dtype,
        fingerprint=checkpoint.fingerprint,
        fc=matrix("fc.weight").prepared(),
        hidden_norm=read("hidden_norm.weight").float(),
        norm=read("norm.weight").float(),
        layers=layers,
        context=context,
        rotation=Rotation.of(config.rope, device.torch_device),
        chooser=chooser,
        own_head=own_head(),
        # Last: it counts what is read above.
        weight_bytes=resident,
        pool=pool or PagePool(),
    )


def read_fc(checkpoint: Checkpoint) -> tuple[DFlashConfig, torch.Tensor]:
    """Read what a target stage needs of a draft: its config, and `fc` [hidden, N * hidden], where it is not packed over
    the mapped file."""
    config = read_config(checkpoint.config)
    return config, checkpoint.dense(find_tensors(config, checkpoint.headers, checkpoint.directory)["fc.weight"])


def load_chooser(checkpoint: Checkpoint, device: Device, dtype: str) -> Chooser:
    """Load a draft's chooser alone, as `DraftKind.load_chooser`."""
    config, chosen_dtype = read_config(checkpoint.config), dtype_from_name(dtype)
    names = find_tensors(config, checkpoint.headers, checkpoint.directory)
    own = {name: names[name] for name in config.chooser_shapes}
    on_cpu = device.torch_device.type == "cpu"
    check_room(
        device, draft_bytes(own, checkpoint.headers, dtype, is_multiplied_apart, on_cpu=on_cpu), "the draft's chooser"
    )
    return _make_chooser(
        config,
        lambda name: checkpoint.weight(own[name], device.torch_device, chosen_dtype),
        lambda name: checkpoint.place(own[name], device.torch_device, chosen_dtype),
    )


def _make_chooser(
    config: DFlashConfig, matrix: Callable[[str], Weight], vector: Callable[[str], torch.Tensor]
) -> Chooser:
    """Return the chooser of tensors that are loaded by their names, matrices that rows are multiplied by apart."""
    names = config.chooser_shapes
    return choosers.load_chooser(
        config.chooser, LayerTensors(LoadedWhenAsked(names, matrix), LoadedWhenAsked(names, vector))
    )
