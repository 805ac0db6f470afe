"""The bytes that a draft's tensors take in memory: a worker checks its limit by this, and the planner counts by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.model.target_tensors import cpu_bytes, loaded_bytes
from services.model.tensor_headers import TensorHeader


def draft_bytes(
    names: Mapping[str, str],
    headers: Mapping[str, TensorHeader],
    dtype: str,
    is_multiplied_apart: Callable[[str], bool],
    *,
    on_cpu: bool,
) -> int:
    """Return the bytes of a draft's weights on a device. Raises Unimplemented for a type that weights cannot have.

    names: as of `DraftFormat.find_tensors`. dtype: what the draft is loaded in. is_multiplied_apart: as of
    `DraftFormat`; such a matrix is there a second time, but for dense ones on a GPU, of which rows are a view, and on a
    CPU that has no instructions for their element type: that is counted as on any CPU.
    """
    total = 0
    for name, stored in names.items():
        header = headers[stored]
        nbytes = (cpu_bytes if on_cpu else loaded_bytes)(stored, header, dtype)
        twice = is_multiplied_apart(name) and (on_cpu or header.packed is not None)
        total += 2 * nbytes if twice else nbytes
    return total
