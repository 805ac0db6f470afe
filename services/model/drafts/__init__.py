"""Draft kinds without their math, one file each, found by name: their config.json, their tensors, what they cache.

A checkpoint is of the kind whose name stands in its `architectures` or `speculators_model_type`, or another name of its
layouts, or that has a `<name>_config` in its config.json. A kind's math is the worker's module of the same name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from services.errors import Unimplemented
from services.model.config import named_dtype
from services.model.tensor_headers import TensorHeader


class DraftConfig(Protocol):
    """What the target's stages and the coordinator need to know of a draft's config.json."""

    @property
    def layout(self) -> str:
        """What drafts of this layout are called."""

    @property
    def hidden_size(self) -> int:
        """Extent of a feature row and of an embedding row; the target's own."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; the target's own."""

    @property
    def max_position(self) -> int:
        """Longest context, in tokens, that the draft was made for."""

    @property
    def block_size(self) -> int:
        """Rows of a block: the known token and the most draft tokens of one proposal."""

    @property
    def mask_token_id(self) -> int:
        """The token whose embedding stands where a draft token is asked for."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The 0-based target blocks whose output the draft reads, in the order of the columns of `fc`."""

    @property
    def draft_vocab_size(self) -> int | None:
        """How many of the target's tokens the draft has an lm_head of its own for; None where it shares the
        target's."""

    @property
    def chooser_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The name and shape of each tensor by which tokens are chosen: they are needed where logits are made."""

    @property
    def num_target_layers(self) -> int:
        """Number of blocks of the target that the draft was made for."""

    def cached_elements(self, max_length: int) -> int:
        """Return how many elements a session of up to `max_length` tokens caches."""


class DraftFormat(Protocol):
    """The functions of a module of this package."""

    LAYOUTS: tuple[str, ...]
    """What else such drafts are called, in lower case, where their layouts have names of their own."""

    def read_config(self, raw: Mapping[str, Any]) -> DraftConfig:
        """Read a config.json. Raises InvalidArgument for values out of range, Unimplemented for what is not served."""

    def tensor_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that a checkpoint with this config (of `read_config`) has."""

    def find_tensors(self, config: Any, headers: Mapping[str, TensorHeader], directory: Path) -> dict[str, str]:
        """Return the names that the tensors of `tensor_shapes` have in a checkpoint.

        Raises InvalidArgument for missing, unknown or mis-shaped tensors.
        """

    def is_multiplied_apart(self, name: str) -> bool:
        """Return whether other rows are multiplied by this tensor of `tensor_shapes` alone, beside those that are by it
        and its neighbours in one product."""


def known_drafts() -> list[str]:
    """Return the names of the draft kinds, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def draft_kind(raw: Mapping[str, Any]) -> str | None:
    """Return the name of the draft kind that a config.json is of, None where it is of none."""
    text = " ".join(_marks(raw)).lower()
    for name in known_drafts():
        if f"{name}_config" in raw or any(known in text for known in (name, *draft_format(name).LAYOUTS)):
            return name
    return None


def check_draft_kind(raw: Mapping[str, Any], directory: Path) -> str:
    """Return the draft kind of a checkpoint. Raises Unimplemented, listing the known kinds, for another kind."""
    name = draft_kind(raw)
    if name is None:
        raise Unimplemented(
            f"{directory} is not a draft of a known kind (architectures: {', '.join(_marks(raw)) or 'none'}); known "
            f"kinds: {', '.join(known_drafts())}",
            field="--draft",
        )
    return name


def draft_format(name: str) -> DraftFormat:
    """Return the module of this name, which is that of a known draft kind."""
    return cast(DraftFormat, importlib.import_module(f"{__name__}.{name}"))


def draft_dtype(raw: Mapping[str, Any], names: Mapping[str, str], headers: Mapping[str, TensorHeader]) -> str:
    """Return the element type that a draft keeps unless told otherwise: that of `fc` as stored.

    Where any matrix is packed it is what config.json names, else that of the last norm. names: of `find_tensors`.
    """
    stored = names["fc.weight"]
    if any(headers[name].packed is not None for name in names.values()):
        named = named_dtype(raw)
        if named is not None:
            return named
        stored = names["norm.weight"]
    return headers[stored].dtype(stored)


def _marks(raw: Mapping[str, Any]) -> list[str]:
    speculators_type = raw.get("speculators_model_type")
    return [*(raw.get("architectures") or []), *([str(speculators_type)] if speculators_type else [])]
