"""Kernels are compiled side by side before they are launched, and found compiled then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from shard_worker.model.kernels.compile_ahead import compile_together, options_from_json
from tests.shard_worker.model.kernels.machine import ON_GPU

on_gpu = pytest.mark.skipif(not ON_GPU, reason="nothing is compiled where kernels are interpreted")


@triton.jit
def _add(numbers, ADDED: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, tl.load(numbers + places) + ADDED)


@triton.jit
def _cannot_be_compiled(numbers, SIZE: tl.constexpr):
    tl.store(numbers + tl.arange(0, SIZE), tl.load(numbers + tl.arange(0, 2 * SIZE)))


@pytest.mark.parametrize("target", [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)], ids=["cuda", "hip"])
@pytest.mark.parametrize("given", [{}, {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}], ids=str)
def test_options_that_went_through_json_name_the_same_compiled_kernel(
    target: GPUTarget, given: dict[str, object]
) -> None:
    backend = make_backend(target)
    options = backend.parse_options(dict(given))
    read = options_from_json(json.loads(json.dumps(options.__dict__)))
    assert backend.parse_options(read).hash() == options.hash()


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """For each kernel that Triton was asked for, its name and whether it was compiled before; nothing is at first."""
    asked: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        asked.append((src.name, cache_hit))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for kernel in (_add, _cannot_be_compiled):
        kernel.device_caches.clear()
    return asked


@pytest.mark.gpu
@on_gpu
def test_what_was_compiled_together_is_found_compiled(compilations: list[tuple[str, bool]]) -> None:
    numbers = torch.zeros(16, device="cuda")

    def launch() -> None:
        numbers.add_(100)
        for added in (1, 2, 1):
            _add[(1,)](numbers, ADDED=added, SIZE=16, num_warps=2)

    compile_together([launch, launch], numbers.device)
    torch.cuda.synchronize()
    assert numbers.tolist() == [0] * 16
    assert compilations == [("_add", False)] * 2
    launch()
    assert numbers.tolist() == [104] * 16
    assert compilations[2:] == [("_add", True)] * 2
    # It is compiled by now, so nothing is left to do, and it is not launched either.
    compile_together([launch], numbers.device)
    assert numbers.tolist() == [104] * 16
    assert len(compilations) == 4


@pytest.mark.gpu
@on_gpu
def test_what_cannot_be_compiled_is_told_where_it_is_launched(compilations: list[tuple[str, bool]]) -> None:
    numbers = torch.zeros(16, device="cuda")

    def launch() -> None:
        _cannot_be_compiled[(1,)](numbers, SIZE=16)
        _add[(1,)](numbers, ADDED=1, SIZE=16)

    compile_together([launch], numbers.device)
    assert compilations == [("_add", False)]
    with pytest.raises(triton.CompilationError):
        launch()


@pytest.mark.gpu
@on_gpu
def test_what_stands_before_an_error_is_compiled(compilations: list[tuple[str, bool]]) -> None:
    numbers = torch.zeros(16, device="cuda")

    def fail() -> None:
        _add[(1,)](numbers, ADDED=5, SIZE=16)
        raise ZeroDivisionError

    compile_together([fail], numbers.device)
    assert compilations == [("_add", False)]
    with pytest.raises(ZeroDivisionError):
        fail()
    assert numbers.tolist() == [5] * 16
    assert compilations[1:] == [("_add", True)]
