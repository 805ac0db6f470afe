"""The shape of a target, as its family reads it from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from services.dtypes import WEIGHT_DTYPES
from services.errors import InvalidArgument
from services.model.config_reader import ConfigReader
from services.model.rope import Rope


class LayerKind(StrEnum):
    """A layer's token mixer, in Hugging Face's words."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"

    @property
    def mixer(self) -> str:
        """The sublayer that mixes tokens: a module of `services.model.layers` and of the worker's own `layers`."""
        return "linear_attention" if self is LayerKind.LINEAR else "attention"


class Activation(StrEnum):
    """What a feed-forward part does to its gates, in the words of Hugging Face's `hidden_act`."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """The sizes of a Gated DeltaNet layer: its heads, and how many inputs its causal convolution spans (taps)."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_taps: int
    qkvz_grouped: bool = False
    """Whether a checkpoint has one projection for queries, keys, values and gates, with the rows of each key head and
    its value heads together."""
    ba_grouped: bool = False
    """The same of betas and decays."""

    @property
    def key_dim(self) -> int:
        """Elements of the keys of all heads, and of the queries."""
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Elements of the values of all heads."""
        return self.value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """SwiGLU as gpt-oss has it, `(up + 1) * gate * sigmoid(alpha * gate)`: of gates cut off above `limit`, and ups cut
    off beyond `limit` on both sides."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """How a router chooses whose scores are made shares by sigmoids: by the share plus a bias of each expert, which
    counts for the choice alone. What the chosen ones give is multiplied by `scale`.

    bias: the name of the biases, in a layer. cap: c, where scores become `c * tanh(score / c)` first; None for none.
    """

    bias: str
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sizes of a mixture of experts.

    count: how many experts there are. chosen: how many of them a row goes through. size: inner elements of each.
    normalised: whether the shares of the chosen ones are made to sum up to 1. layers: those whose feed-forward part is
    such a mixture. shared_size: inner elements of an expert that all rows go through too; None without one. router: the
    name of its module, in a layer. prefix: what the names of the experts' tensors begin with, in a layer. biased:
    whether the router's scores and the products with experts have biases. clamped: how experts gate, None for plain
    SwiGLU. beside_dense: whether rows go through a dense part too, which has norms of its own. sigmoid: how the router
    chooses, None for the largest shares of a softmax. shared: the module of the shared expert, in a layer.
    shared_gated: whether rows take a share of what that makes, and not all of it.
    """

    count: int
    chosen: int
    size: int
    normalised: bool
    layers: frozenset[int]
    shared_size: int | None = None
    router: str = "mlp.gate"
    prefix: str = "mlp.experts."
    biased: bool = False
    clamped: ClampedSwiGlu | None = None
    beside_dense: bool = False
    sigmoid: SigmoidRouting | None = None
    shared: str = "mlp.shared_expert"
    shared_gated: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidArgument where more experts are to be chosen than there are."""
        if self.chosen > self.count:
            raise InvalidArgument(
                f"config.json: num_experts_per_tok is {self.chosen}; it must be at most num_experts, {self.count}",
                field="num_experts_per_tok",
            )


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """The sizes of per-layer embeddings: elements that a token brings to each layer, and how many tokens have any."""

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How one layer attends.

    heads, kv_heads, head_dim: of queries, of keys and values, and elements of each. rope: how positions enter. window:
    how many positions a row sees, its own included; None for all before it. score_scale: what the products of queries
    and keys are multiplied by; None for 1 / sqrt(head_dim). keys_as_values: whether values are what the projection of
    keys makes, before its norm and RoPE. value_norm: whether values have an RMSNorm, without weights.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    score_scale: float | None = None
    keys_as_values: bool = False
    value_norm: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgument for numbers that contradict each other."""
        check_heads(self.heads, self.kv_heads)
        rotated = self.rope.rotary_dim
        if rotated % 2 or not 2 <= rotated <= self.head_dim:
            raise InvalidArgument(
                f"config.json: {rotated} of {self.head_dim} elements of a head would rotate; it must be an "
                "even number of them",
                field="partial_rotary_factor",
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only target. Sizes count elements; positions and windows count tokens."""

    family: str
    """The name of its module in `services.model.families`."""
    hidden_size: int
    mlp_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    """The kind of every layer, in order."""
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    """How positions enter attention."""
    norm_eps: float
    max_position: int
    """The longest context that the model was made for."""
    tied_head: bool
    """Whether lm_head is the embedding matrix."""
    norm_offset: float = 0.0
    """What is added to a stored RMSNorm weight: 1 where weights are stored centred on 0."""
    attention_bias: bool = False
    """Whether the projections of attention layers have a bias."""
    output_bias: bool = True
    """Whether that of their output has one then, too."""
    mlp_bias: bool = False
    """Whether the projections of SwiGLU have a bias."""
    qk_norm: bool = True
    """Whether queries and keys have an RMSNorm of each head."""
    attention_sinks: bool = False
    """Whether attention's softmax has one number more for each head, learned, which no value belongs to."""
    attention_gate: bool = False
    """Whether attention's output is multiplied by a sigmoid gate, which the query projection also makes."""
    gates_per_head: int | None = None
    """How many gates each head has, 1 or one for each element: numbers that a projection of their own makes, by whose
    softplus attention's output is multiplied. None without."""
    layer_heads: tuple[int, ...] | None = None
    """Query heads of each layer, where they differ by layer."""
    sliding_window: int | None = None
    """How many positions a sliding layer's row sees, its own included."""
    full_attention: AttentionShape | None = None
    """How full layers attend, where it is otherwise than the fields above say of all layers."""
    score_scale: float | None = None
    """As of `AttentionShape`."""
    value_norm: bool = False
    """As of `AttentionShape`."""
    sharing_layers: int = 0
    """How many of the last layers have no keys and values of their own, but attend to those of the last layer of their
    kind before them."""
    sharing_mlp_size: int | None = None
    """Inner elements of the feed-forward parts of those layers, where they are others than `mlp_size`."""
    per_layer: PerLayerConfig | None = None
    """The sizes of per-layer embeddings, where there are any."""
    output_norms: bool = False
    """Whether what the mixer makes, and what the feed-forward part makes, has an RMSNorm before it is added."""
    output_scale: bool = False
    """Whether each layer has a number that its output is multiplied by."""
    activation: Activation = Activation.SILU
    """What feed-forward parts do to their gates."""
    embedding_scale: float = 1.0
    """What embedding rows are multiplied by, rounded to the element type of activations."""
    logit_cap: float | None = None
    """c, where logits become `c * tanh(logits / c)`."""
    experts: ExpertsConfig | None = None
    """The sizes of mixtures of experts, where there are any."""
    linear: LinearAttentionConfig | None = None
    """The sizes of linear layers, where there are any."""
    dtype: str | None = None
    """The element type that the configuration names, which activations have where matrices are packed."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for numbers that contradict each other."""
        self._attention(LayerKind.FULL)
        if not set(self.layer_kinds) <= set(self.layer_kinds[: max(self.num_layers - self.sharing_layers, 0)]):
            raise InvalidArgument(
                f"config.json: num_kv_shared_layers is {self.sharing_layers}; before so many of the {self.num_layers} "
                "layers there must be one of each kind, whose keys and values they share",
                field="num_kv_shared_layers",
            )
        for heads in self.layer_heads or ():
            check_heads(heads, self.kv_heads)
        if LayerKind.SLIDING in self.layer_kinds and self.sliding_window is None:
            raise InvalidArgument(
                "config.json: some layers are sliding_attention, but there is no window: give sliding_window and "
                "use_sliding_window",
                field="sliding_window",
            )

    def attention(self, layer: int) -> AttentionShape:
        """Return how a layer attends, which is not a recurrent one."""
        shape = self._attention(self.layer_kinds[layer])
        return shape if self.layer_heads is None else replace(shape, heads=self.layer_heads[layer])

    def _attention(self, kind: LayerKind) -> AttentionShape:
        if kind is LayerKind.FULL and self.full_attention is not None:
            return self.full_attention
        window = self.sliding_window if kind is LayerKind.SLIDING else None
        scale, norm = self.score_scale, self.value_norm
        return AttentionShape(
            self.heads, self.kv_heads, self.head_dim, self.rope, window, score_scale=scale, value_norm=norm
        )

    @property
    def attention_shapes(self) -> dict[int, AttentionShape]:
        """How each layer attends, by its index; recurrent ones are left out."""
        kinds = enumerate(self.layer_kinds)
        return {layer: self.attention(layer) for layer, kind in kinds if kind is not LayerKind.LINEAR}

    def keys_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, unless it shares them."""
        own = self.num_layers - self.sharing_layers
        if layer < own:
            return layer
        return next(other for other in reversed(range(own)) if self.layer_kinds[other] is self.layer_kinds[layer])

    @property
    def last_cut(self) -> int:
        """The last layer that may be the first one on a device, behind others: from there on layers read no keys and
        values of those before it."""
        own = self.num_layers - self.sharing_layers
        return min((self.keys_of(layer) for layer in range(own, self.num_layers)), default=self.num_layers - 1)

    def mlp_size_of(self, layer: int) -> int:
        """Return the inner elements of a layer's feed-forward part."""
        shares = self.sharing_mlp_size is not None and self.keys_of(layer) != layer
        return self.sharing_mlp_size if shares and self.sharing_mlp_size is not None else self.mlp_size

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """All ways in which positions enter attention."""
        return tuple(dict.fromkeys((self.rope, *(shape.rope for shape in self.attention_shapes.values()))))

    def feed_forward(self, layer: int) -> str:
        """Return the feed-forward part of a layer: a module of `services.model.layers` and of the worker's `layers`."""
        if self.experts is None or layer not in self.experts.layers:
            return "swiglu"
        return "experts_beside" if self.experts.beside_dense else "experts"

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layer_kinds)


def named_dtype(raw: Mapping[str, Any]) -> str | None:
    """Return the element type of activations that a config.json names, inside its text part or outside of it."""
    text = raw.get("text_config")
    for place in (text if isinstance(text, Mapping) else {}, raw):
        for key in ("dtype", "torch_dtype"):
            name = str(place.get(key)).removeprefix("torch.")
            if name in WEIGHT_DTYPES:
                return name
    return None


def check_heads(heads: int, kv_heads: int, source: str = "config.json") -> None:
    """Check that query heads spread evenly over key/value heads. Raises InvalidArgument when they don't."""
    if heads % kv_heads:
        raise InvalidArgument(
            f"{source}: num_attention_heads is {heads}; it must be a multiple of num_key_value_heads, {kv_heads}",
            field="num_attention_heads",
        )


def read_layer_kinds(
    reader: ConfigReader, default: tuple[LayerKind, ...], known: set[LayerKind]
) -> tuple[LayerKind, ...]:
    """Return `layer_types` where given, else the default.

    known: the kinds that the family has. Raises InvalidArgument unless `layer_types` names one of them for each layer
    of the default.
    """
    names = reader.raw("layer_types")
    if names is None:
        return default
    accepted = ", ".join(sorted(known))
    if not isinstance(names, list) or len(names) != len(default) or any(name not in known for name in names):
        raise InvalidArgument(
            f"{reader.source}: layer_types must name {len(default)} layers, each one of {accepted}",
            field="layer_types",
        )
    return tuple(LayerKind(name) for name in names)


def read_sparse_layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """Return the layers that have experts: each `decoder_sparse_step`-th one that is not in
    `mlp_only_layers`.

    Raises InvalidArgument for anything else than numbers.
    """
    step, dense = reader.integer("decoder_sparse_step", 1), reader.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in dense):
        raise InvalidArgument(
            f"config.json: mlp_only_layers is {dense!r}; it must be a list of layer numbers", field="mlp_only_layers"
        )
    return frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
