"""Ways of packing matrices in Hugging Face checkpoints, one file each, found by `quantization_config.quant_method`.

Whether a matrix is packed is read from the checkpoint's tensors; `quantization_config` says how. A module has one
function, `find_matrices`, which names the packed matrices and the stored tensors that each consists of. What these
contain is read by the worker's module in `shard_worker.weights.formats` that `PackedMatrix.format` names; several ways
of packing may store matrices in one format.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from services.errors import InvalidArgument, Unimplemented
from services.model.packed_parts import CONFIG_KEY
from services.model.stored_experts import experts_apart
from services.model.tensor_headers import TensorHeader


@dataclass(frozen=True, slots=True)
class FoundMatrices:
    """The packed matrices of a checkpoint, by the names that models know them by, like "lm_head.weight".

    unused: stored tensors that nothing here is computed with, such as scales of activations.
    """

    matrices: Mapping[str, TensorHeader]
    unused: frozenset[str] = field(default=frozenset())


class PackingMethod(Protocol):
    """What a module of this package offers."""

    def find_matrices(
        self, settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path
    ) -> FoundMatrices:
        """Find the packed matrices among a checkpoint's tensors. settings: quantization_config. directory: for errors.

        Raises Unimplemented for a variant that is not served, by name, and InvalidArgument for parts that are missing,
        that do not fit each other, or that a list in the settings contradicts.
        """


def known_methods() -> list[str]:
    """Return the names of all ways of packing, as `quant_method` has them, sorted."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def packing_settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `quantization_config` of a config.json, or of the text part of it; None where there is none.

    Raises InvalidArgument for one that names no method.
    """
    nested = config.get("text_config")
    settings = config.get(CONFIG_KEY) or (nested.get(CONFIG_KEY) if isinstance(nested, Mapping) else None)
    if not settings:
        return None
    if not isinstance(settings, Mapping) or not isinstance(settings.get("quant_method"), str):
        raise InvalidArgument(
            f"config.json: {CONFIG_KEY} must be an object with a quant_method, one of {', '.join(known_methods())}",
            field=CONFIG_KEY,
        )
    return settings


def logical_headers(
    config: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path
) -> dict[str, TensorHeader]:
    """Return the headers of a checkpoint's tensors as a model asks for them: a packed matrix is one tensor, and so is
    each of an expert's.

    stored: the headers of the files' tensors. directory: named in errors.

    Raises Unimplemented for an unknown way of packing, listing the known ones, and what `find_matrices` raises.
    """
    settings, (stored, _) = packing_settings(config), experts_apart(stored)
    if settings is None:
        return dict(stored)
    method = settings["quant_method"]
    if method not in known_methods():
        raise Unimplemented(
            f"config.json: {CONFIG_KEY}.quant_method {method!r} is not supported, only {', '.join(known_methods())} "
            "are: convert the checkpoint to one of these, or use the one that is not quantised",
            field=CONFIG_KEY,
        )
    module = cast(PackingMethod, importlib.import_module(f"{__name__}.{method.replace('-', '_')}"))
    found = module.find_matrices(settings, stored, directory)
    parts = {part for header in found.matrices.values() if header.packed for part in header.packed.parts.values()}
    for name in found.matrices:
        if name in stored and name not in parts:
            raise InvalidArgument(
                f"tensor {name} is in {directory} twice, packed and as it is: a checkpoint must have it once",
                reason="TENSOR_TWICE",
                field=name,
            )
    left_out = parts | found.unused
    return {name: header for name, header in stored.items() if name not in left_out} | dict(found.matrices)
