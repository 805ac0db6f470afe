"""Draft kinds, one file each, found by name. A drafter module has `load(checkpoint, device, dtype) -> Draft`."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from services.errors import Unimplemented
from shard_worker.weights.checkpoint import Checkpoint


def known_drafters() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def drafter_of(checkpoint: Checkpoint) -> Any:
    """The module for a draft checkpoint. Raises Unimplemented, listing the known kinds, for another kind."""
    config = checkpoint.config
    marks = [*(config.get("architectures") or []), str(config.get("speculators_model_type") or "")]
    text = " ".join(marks).lower()
    for name in known_drafters():
        if name in text or f"{name}_config" in config:
            return importlib.import_module(f"{__name__}.{name}")
    raise Unimplemented(
        f"{checkpoint.directory} is not a draft of a known kind (architectures: {', '.join(marks) or 'none'}); "
        f"known kinds: {', '.join(known_drafters())}",
        field="--draft",
    )
