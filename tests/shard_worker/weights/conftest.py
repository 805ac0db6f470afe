"""The forms in which CPUs hold packed matrices."""

from __future__ import annotations

import pytest
import torch

from shard_worker.cpu_kernels import native
from shard_worker.weights.cpu_codes import CpuCodesWeight
from shard_worker.weights.cpu_int4 import CpuInt4Weight
from shard_worker.weights.weight import Weight


@pytest.fixture(params=[CpuInt4Weight, CpuCodesWeight])
def cpu_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Weight]:
    """The form that packed matrices are prepared in, whatever suits this CPU best."""
    form: type[Weight] = request.param
    if form is CpuCodesWeight:
        if not native.is_available():
            pytest.skip("llvmlite is not installed, or torch has no OpenMP")
        monkeypatch.setattr(native, "multiplies", lambda dtype: False)
        return form
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch has no fast int4 product here")
    monkeypatch.setattr(CpuCodesWeight, "takes", lambda packed: False)
    return form


@pytest.fixture
def largest_cpu_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed matrices are prepared in the form that takes most memory, whose bytes the planner counts."""
    monkeypatch.setattr(CpuCodesWeight, "takes", lambda packed: False)
