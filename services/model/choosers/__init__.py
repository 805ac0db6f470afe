"""How drafts choose tokens, without the math: one file each, found by name.

A draft's layers make a hidden row of each place of a block, and an lm_head makes logits of it; a chooser says which
tokens these stand for. Its file says which of a draft's keys and tensors are its own; its math is the worker's module
of the same name. It must not know the draft's layers.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol, cast

from services.model.config_reader import ConfigReader

PLAIN = "argmax"
"""The chooser of drafts that name none: the most probable token of each row."""


class ChooserConfig(Protocol):
    """What a draft's config.json says of its chooser."""

    @property
    def name(self) -> str:
        """The chooser's module."""

    @property
    def layout(self) -> str:
        """What drafts with it are called."""

    @property
    def from_anchor(self) -> bool:
        """Whether a draft with it proposes from the known token's row on, unless its config.json says otherwise."""

    @property
    def needs_embedding(self) -> bool:
        """Whether it looks up tokens of the block in the target's embedding."""

    def tensor_shapes(self, hidden_size: int, vocab_size: int, head_rows: int) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that it adds to those of the draft's layers.

        head_rows: of the lm_head that the draft proposes by, vocab_size unless the draft has a smaller one of its own.
        """


class ChooserFormat(Protocol):
    """The functions of a module of this package."""

    def read_config(self, reader: ConfigReader) -> ChooserConfig:
        """Read the chooser's keys of a draft's config.json. Raises InvalidArgument for values out of range."""


def known_choosers() -> list[str]:
    """Return the names of the choosers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def chooser_name(raw: Mapping[str, Any]) -> str:
    """Return the name of the chooser that a draft's config.json asks for: the one that stands in its `architectures`,
    its `speculators_model_type` or its `projector_type`."""
    nested = raw.get("dflash_config")
    marks = [
        *(raw.get("architectures") or []),
        raw.get("speculators_model_type"),
        raw.get("projector_type"),
        nested.get("projector_type") if isinstance(nested, Mapping) else None,
    ]
    text = " ".join(str(mark) for mark in marks if mark).lower()
    return next((name for name in known_choosers() if name in text), PLAIN)


def chooser_format(name: str) -> ChooserFormat:
    """Return the module of this name, which is that of a known chooser."""
    return cast(ChooserFormat, importlib.import_module(f"{__name__}.{name}"))
