"""The shape of a target model, read from a checkpoint's config.json by its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.errors import InvalidArgument, Unimplemented


class LayerKind(StrEnum):
    """A layer's token mixer, in Hugging Face's words."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Gated DeltaNet: heads and their sizes, taps of the causal convolution."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_taps: int

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only target. Sizes count elements; positions and windows count tokens."""

    hidden_size: int
    mlp_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    max_position: int
    tied_head: bool
    attention_bias: bool = False
    sliding_window: int | None = None
    linear: LinearAttentionConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)


class ConfigReader:
    """Typed reading of a config.json, naming the key in every refusal."""

    def __init__(self, raw: Mapping[str, Any], source: str = "config.json") -> None:
        self._raw, self._source = raw, source

    def has(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def raw(self, key: str) -> Any:
        return self._raw.get(key)

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InvalidArgument(
                f"{self._source}: {key} is {value!r}; it must be a whole number of at least {at_least}",
                field=key,
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidArgument(f"{self._source}: {key} is {value!r}; it must be above 0", field=key)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InvalidArgument(f"{self._source}: {key} is {value!r}; it must be true or false", field=key)
        return value

    def rope_theta(self, default: float) -> float:
        """From `rope_parameters` or the top level. Raises Unimplemented for scaled RoPE."""
        nested = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise Unimplemented(
                f"{self._source}: rope type {kind!r} is not supported, only 'default' is",
                field="rope_type",
            )
        merged = ConfigReader({**self._raw, **nested}, self._source)
        return merged.number("rope_theta", default)

    def layer_kinds(self, default: tuple[LayerKind, ...], known: set[LayerKind]) -> tuple[LayerKind, ...]:
        """`layer_types` where given, checked against the number of layers and the kinds that the family has."""
        names = self._raw.get("layer_types")
        if names is None:
            return default
        accepted = ", ".join(sorted(known))
        if len(names) != len(default) or any(name not in known for name in names):
            raise InvalidArgument(
                f"{self._source}: layer_types must name {len(default)} layers, each one of {accepted}",
                field="layer_types",
            )
        return tuple(LayerKind(name) for name in names)
