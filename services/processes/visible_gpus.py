"""Which GPUs a child worker sees: its own and no others, and never another vendor's.

A process that sees a GPU may take memory on it unasked. Hidden GPUs shift the numbers of the others, so the child is
told which numbers its own ones have for its parent. Parent and child use the two ends of this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "FLASHSPLIT_VISIBLE_GPUS"
"""The parent's numbers of the GPUs that the child sees, in the child's order, like "1,3"."""

# The variable that this module sets comes first; a ROCm build of torch obeys NVIDIA's variable too.
_VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
_NONE = "-1"


def environment_for(devices: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment for devices like "cuda:1+cuda:3", "cpu" or "best", which leaves it as it is.

    environment: the parent's. A GPU that the parent does not see changes nothing, so that the child refuses it by name.
    """
    child = dict(environment)
    if devices == "best":
        return child
    names = devices.split("+")
    vendor = names[0].partition(":")[0]
    for other, variables in _VARIABLES.items():
        if other != vendor:
            for variable in variables:
                child.pop(variable, None)
    if vendor == "cpu":
        return child | {variables[0]: _NONE for variables in _VARIABLES.values()}
    numbers = [int(name.partition(":")[2]) for name in names]
    main, *_ = _VARIABLES[vendor]
    visible = environment.get(main)
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    if entries is not None and max(numbers) >= len(entries):
        return child
    if entries is None:
        child[main] = ",".join(str(number) for number in numbers)
    else:
        child[main] = ",".join(entries[number] for number in numbers)
    child[VARIABLE] = ",".join(str(number) for number in numbers)
    return child


def visible_numbers(environment: Mapping[str, str] = os.environ) -> list[int] | None:
    """Return, in the child, the parent's numbers of the GPUs seen here, in order; None where nothing was hidden."""
    text = environment.get(VARIABLE)
    return None if text is None else [int(number) for number in text.split(",")]
