"""Model families, one file each, named after Hugging Face's `model_type` and found by that name.

A family module has one function, `read_config(raw) -> ModelConfig`, which reads the text part of a config.json and
raises InvalidArgument or Unimplemented for what it cannot serve. Where it reads a key that is refused for most
families, it names it in `OWN_KEYS`. Everything else about a family (its tensors, its caches, its math) follows from the
layers that its ModelConfig names.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, Protocol, cast

from services.errors import InvalidArgument, Unimplemented
from services.model.config import ModelConfig, named_dtype
from services.model.config_reader import ConfigReader

TEXT_SUFFIX = "_text"
"""What the `model_type` of a multimodal model's text part ends with."""


_NEUTRAL: Mapping[str, tuple[float | bool, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "swiglu_limit": (),
    "use_qk_norm": (False,),
}
"""Keys with which some models scale, clip or gate what most families here don't, and the values with which they change
nothing."""


class Family(Protocol):
    """What a family module offers; OWN_KEYS too, where it has any of the keys of `_NEUTRAL`."""

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the text part of a config.json."""


def known_families() -> list[str]:
    """Return the names of all families, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def read_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a target's config.json by its family.

    Raises InvalidArgument without a model_type, Unimplemented for an unknown family, listing the known ones, and what
    the family's `read_config` raises.
    """
    name = raw.get("model_type")
    if not isinstance(name, str):
        raise InvalidArgument("config.json has no model_type", field="model_type")
    name = name.removesuffix(TEXT_SUFFIX)
    if name not in known_families():
        raise Unimplemented(
            f"model_type {raw['model_type']!r} is not supported; known families: {', '.join(known_families())}",
            reason="UNKNOWN_FAMILY",
            field="model_type",
        )
    family = cast(Family, importlib.import_module(f"{__name__}.{name}"))
    _check_plain(raw, getattr(family, "OWN_KEYS", frozenset()))
    nested = raw.get("text_config")
    # Where a multimodal config says it only once, it says it outside.
    outer = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
    text = {**outer, **nested} if isinstance(nested, Mapping) else raw
    return replace(family.read_config(text), dtype=named_dtype(raw))


def _check_plain(raw: Mapping[str, Any], own_keys: Set[str]) -> None:
    """Raise Unimplemented for a key that asks for math which the family does not have, whatever its reader would make
    of it. own_keys: those that the family reads."""
    text = raw.get("text_config")
    reader = ConfigReader({**raw, **(text if isinstance(text, Mapping) else {})})
    for key, values in _NEUTRAL.items():
        if key not in own_keys:
            reader.only(key, *values)
