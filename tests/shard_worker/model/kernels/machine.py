"""Where kernels are tried: on the machine's GPU, or, with TRITON_INTERPRET=1, number by number on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.device.devices import Device, best_devices, kernel_target, parse_devices
from tests.shard_worker.tiny import AS_GPU

if TYPE_CHECKING:
    from shard_worker.model.kernels.step_parameters import Places

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
"""The interpreter knows no bfloat16 products."""


def device() -> Device:
    return parse_devices(best_devices()[0])[0] if ON_GPU else AS_GPU


TARGET = kernel_target(device().torch_device)
LANE_COLUMNS = 0 if TARGET is None else TARGET.lane_columns
"""As packed matrices have them there."""


def seldom(*values: Any) -> Any:
    """A case that takes seconds where kernels are interpreted, and differs in a shape alone from one that does not:
    there it runs only with the slow tests, on a GPU always."""
    return pytest.param(*values, marks=pytest.mark.slow)


def places_of(cache: AttentionCache, base: int, rows: int) -> Places:
    """Where so many rows stand in a cache, on the device."""
    from shard_worker.model.kernels.step_parameters import StepParameters

    parameters = StepParameters(device().torch_device, len(cache.addresses), rows=rows)
    parameters.fill(base, rows, attention=cache)
    parameters.send()
    parameters.record_launch()
    return parameters.places(rows)
