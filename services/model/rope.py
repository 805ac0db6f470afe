"""Rotary position embedding (RoPE) as a configuration asks for it: its base, and how it is stretched for long contexts.

Read from `rope_parameters`, or from `rope_scaling` as it was called before. Targets and drafts have each their own. The
frequencies that follow are computed in `shard_worker.ops.rope`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.errors import InvalidArgument, Unimplemented
from services.model.config_reader import ConfigReader

OPTION = "--rope-scaling"

_PLACES = ("rope_parameters", "rope_scaling")
_TYPES = ("default", "linear", "llama3", "yarn")
_STRETCHING = _TYPES[1:]
_OF_GGUF = "divided"
_PARTIAL = "proportional"
_SCALED_KIND = "full_attention"
"""The kind of layers that is stretched where layers differ in RoPE: sliding ones never look far."""
_KEPT = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""What is said beside the scaling; positions of text are the same in all sections of `mrope_section`."""
_KNOWN = _KEPT | {
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "divisors",
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies are divided by the factor where less than `low_freq_factor` turns fit into the original context, kept
    where more than `high_freq_factor` do, and blended between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies are kept where `beta_fast` turns or more fit into the original context,
    divided by the factor where `beta_slow` or less do, and blended between the two, pair by pair.

    truncate: whether the blend begins and ends at whole pairs. attention_factor: what cos and sin are multiplied by.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first pairs of a head turn, at the rates that they have where all do, divided by the factor."""

    pairs: int
    factor: float


@dataclass(frozen=True, slots=True)
class DividedScaling:
    """Each frequency has a divisor of its own, as GGUF files of Llama have them."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE of one model. rotary_dim: the first elements of a head that it rotates. theta: its base."""

    rotary_dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | DividedScaling | None = None


def rope_parameters(reader: ConfigReader) -> Mapping[str, Any]:
    """Return what a config.json says of RoPE in an object of its own; an empty one where it says nothing there.

    Raises InvalidArgument for anything else than an object.
    """
    return next((found for key in _PLACES if (found := reader.mapping(key))), {})


def read_rope(reader: ConfigReader, rotary_dim: int, default_theta: float = 10_000.0) -> Rope:
    """Read RoPE.

    Raises Unimplemented for a type or a key that is not served, and for RoPE that differs by layer, InvalidArgument for
    numbers out of range.
    """
    nested = rope_parameters(reader)
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise Unimplemented(
            f"{reader.source}: rope_parameters that differ by layer are not supported", field="rope_parameters"
        )
    _check_keys(nested, reader.source, Unimplemented)
    kind, merged = _type_of(nested), reader.with_keys(nested)
    theta = merged.number("rope_theta", default_theta)
    if kind == "default":
        return Rope(rotary_dim, theta)
    if kind == _OF_GGUF:
        return Rope(rotary_dim, theta, _divided(merged, rotary_dim))
    factor = merged.number("factor") if kind != "yarn" or merged.has("factor") else None
    if kind == "linear":
        assert factor is not None
        return Rope(rotary_dim, theta, LinearScaling(factor))
    longest = "max_position_embeddings"
    original = merged.integer(f"original_{longest}" if merged.has(f"original_{longest}") else longest)
    if kind == "llama3":
        assert factor is not None
        low, high = merged.number("low_freq_factor"), merged.number("high_freq_factor")
        if high <= low:
            raise InvalidArgument(
                f"{reader.source}: high_freq_factor is {high:g}; it must be above low_freq_factor, {low:g}",
                field="high_freq_factor",
            )
        return Rope(rotary_dim, theta, Llama3Scaling(factor, low, high, original))
    if factor is None:
        factor = merged.integer(longest) / original
    return Rope(rotary_dim, theta, _yarn(merged, factor, original))


def read_rope_of_kind(reader: ConfigReader, kind: str, rotary_dim: int, theta_key: str, default_theta: float) -> Rope:
    """Read RoPE of one kind of layers, where layers differ in it.

    kind: full_attention or sliding_attention; `rope_parameters` has an object of each. Older files, in which it is one
    object or none, mean full layers by it; the base is then under `theta_key`. Raises as `read_rope`.
    """
    nested = rope_parameters(reader)
    by_kind = any(isinstance(value, Mapping) for value in nested.values())
    own = (nested.get(kind) or {}) if by_kind else nested if kind == _SCALED_KIND else {}
    if not isinstance(own, Mapping):
        raise InvalidArgument(
            f"{reader.source}: rope_parameters has {own!r} for {kind}; it must be an object", field="rope_parameters"
        )
    theta = own.get("rope_theta", reader.raw(theta_key))
    plain = dict.fromkeys(_PLACES, None) | {_PLACES[0]: {**own, **({} if theta is None else {"rope_theta": theta})}}
    own_reader = reader.with_keys({**plain, "rope_theta": None})
    if own.get("rope_type") != _PARTIAL:
        own_reader.with_keys(own).only("partial_rotary_factor", 1.0)
        return read_rope(own_reader, rotary_dim, default_theta)
    _check_keys(own, reader.source, Unimplemented)
    values = reader.with_keys({"rope_theta": default_theta, "partial_rotary_factor": 1.0, "factor": 1.0, **own})
    # As the reference rounds it.
    pairs = int(values.number("partial_rotary_factor") * rotary_dim // 2)
    return Rope(rotary_dim, values.number("rope_theta"), ProportionalScaling(pairs, values.number("factor")))


def context_length(reader: ConfigReader, rope: Rope, default: int = 32768) -> int:
    """Return the longest context that a model is made for, in tokens.

    It is `max_position_embeddings`, or the original context times the factor of YaRN where that is more: many files
    that were made for the original one are stretched by adding YaRN alone.
    """
    length = reader.integer("max_position_embeddings", default)
    if isinstance(rope.scaling, YarnScaling):
        return max(length, int(rope.scaling.original_length * rope.scaling.factor))
    return length


def parse_rope_scaling(text: str) -> str:
    """Return what `--rope-scaling` is given as workers are told it: the same object as JSON with sorted keys.

    Raises InvalidArgument for anything else than an object of known keys with a known `rope_type`.
    """
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{OPTION} {text!r} is not JSON: {error}", field=OPTION) from error
    if not isinstance(keys, dict) or not ("rope_type" in keys or "type" in keys):
        raise InvalidArgument(
            f'{OPTION} {text!r} must be an object with a rope_type, like {{"rope_type":"yarn","factor":4.0,'
            '"original_max_position_embeddings":32768}',
            field=OPTION,
        )
    _check_keys(keys, OPTION, InvalidArgument)
    if _type_of(keys) in _STRETCHING:
        ConfigReader(keys, OPTION).number("factor")
    return json.dumps(keys, sort_keys=True)


def with_rope_scaling(raw: Mapping[str, Any], scaling: str | None) -> dict[str, Any]:
    """Return a target's config.json with its RoPE scaled as `parse_rope_scaling` returned it; None changes nothing.

    It takes the place of the scaling in the file. What else the file says of RoPE stays, unless it is given anew.
    Raises as `read_rope`.
    """
    if scaling is None:
        return dict(raw)
    nested = raw.get("text_config")
    text = nested if isinstance(nested, Mapping) else raw
    keys = json.loads(scaling)
    given = rope_parameters(ConfigReader(text))
    own = given.get(_SCALED_KIND, given)
    kept = {key: value for key, value in own.items() if key in _KEPT}
    scaled: dict[str, Any] = {**kept, **keys}
    plain = {key: value for key, value in text.items() if key not in _PLACES}
    changed = {**plain, _PLACES[0]: scaled if own is given else {**given, _SCALED_KIND: scaled}}
    return {**raw, "text_config": changed} if isinstance(nested, Mapping) else changed


def _type_of(parameters: Mapping[str, Any]) -> str:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "mrope":
        return "default"
    if kind not in (*_TYPES, _OF_GGUF):
        raise Unimplemented(
            f"rope_type {kind!r} is not supported, only {', '.join(_TYPES[:-1])} and {_TYPES[-1]} are",
            field="rope_type",
        )
    return str(kind)


def _check_keys(parameters: Mapping[str, Any], source: str, error: type[InvalidArgument] | type[Unimplemented]) -> None:
    unknown = sorted(set(parameters) - _KNOWN)
    if unknown:
        raise error(
            f"{source}: {unknown[0]} is not a key of RoPE that is known; known keys are {', '.join(sorted(_KNOWN))}",
            field=unknown[0],
        )


def _divided(reader: ConfigReader, rotary_dim: int) -> DividedScaling:
    divisors = reader.raw("divisors")
    if (
        not isinstance(divisors, list)
        or len(divisors) != rotary_dim // 2
        or any(isinstance(one, bool) or not isinstance(one, int | float) or one <= 0 for one in divisors)
    ):
        raise InvalidArgument(
            f"{reader.source}: divisors of RoPE must be {rotary_dim // 2} numbers above 0, one for each frequency",
            field="divisors",
        )
    return DividedScaling(tuple(float(one) for one in divisors))


def _yarn(reader: ConfigReader, factor: float, original: int) -> YarnScaling:
    fast, slow = reader.number("beta_fast", 32.0), reader.number("beta_slow", 1.0)
    if fast < slow:
        raise InvalidArgument(
            f"{reader.source}: beta_fast is {fast:g}; it must be at least beta_slow, {slow:g}", field="beta_fast"
        )

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    default = magnitude(1.0)
    if reader.raw("mscale") and reader.raw("mscale_all_dim"):
        default = magnitude(reader.number("mscale", 1.0)) / magnitude(reader.number("mscale_all_dim", 1.0))
    return YarnScaling(
        factor, original, fast, slow, reader.flag("truncate", True), reader.number("attention_factor", default)
    )
