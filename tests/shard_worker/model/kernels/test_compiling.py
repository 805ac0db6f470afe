"""Kernels compile for GPUs that are not here, within what those have, and alike for all numbers of rows."""

from __future__ import annotations

import pytest

from shard_worker.weights.random_packed import KINDS
from tests.shard_worker.model.kernels.compiling import CASES, EXPERTS, TARGETS, WALKS, Compiled, compiled_kernels

MOST_SPILLS = {"bfloat16": 100, "float16": 100, "float32": 512}
"""Registers that a thread may keep in memory, by what it multiplies: float32 takes three passes, or no matrix units. An
H100 keeps 340 for heads of 256 numbers in float32, with the tiles that its figures were measured with."""

USUAL = ["gfx942", "gfx1100", "sm_86"]
"""A server of AMD's, a gaming card of theirs and one of NVIDIA's: one of each kind of matrix unit."""


@pytest.fixture(scope="module")
def usual() -> list[Compiled]:
    """On the usual targets what a 27B launches, on one of them what the demo pair does in its place; mixtures of
    experts, a packed product, and choosers."""
    server, gaming, other = USUAL
    largest = compiled_kernels(
        [server, other], ["27b"], ["q4_k"], [16], experts=True, packed_experts=["q4_k"], walks=True
    )
    return [*largest, *compiled_kernels([gaming], ["demo"], ["q4_k"], [16], experts=True)]


def check(kernels: list[Compiled]) -> None:
    """Fail where a kernel does not compile, does not fit, or keeps too much of its numbers in memory."""
    assert [kernel for kernel in kernels if kernel.error] == []
    assert [kernel for kernel in kernels if kernel.shared > TARGETS[kernel.target].shared_bytes] == []
    assert [kernel for kernel in kernels if kernel.spills > MOST_SPILLS[multiplied(kernel)]] == []


def multiplied(kernel: Compiled) -> str:
    """The element type of a kernel's products."""
    if kernel.kernel.startswith("delta_prefill"):
        return "float32"
    return CASES[kernel.case].dtype if kernel.case in CASES else "bfloat16"


def check_layouts(kernels: list[Compiled]) -> None:
    """Fail where attention sums in another order for another height of its tiles."""
    found: dict[tuple[object, ...], set[tuple[str, ...]]] = {}
    for kernel in kernels:
        if kernel.kernel == "attention._attend":
            key = (kernel.target, kernel.case, *(kernel.constants[name] for name in ("DIM", "WINDOW", "CAUSAL")))
            found.setdefault(key, set()).add(kernel.layouts)
    assert found
    assert {key: layouts for key, layouts in found.items() if len(layouts) > 1} == {}


@pytest.mark.timeout(600)
def test_kernels_compile_and_fit(usual: list[Compiled]) -> None:
    """For each usual target: no error, shared memory within the GPU's, few registers in memory."""
    for case in ("q4_k", EXPERTS):
        assert {kernel.target for kernel in usual if kernel.case == case} == set(USUAL)
    assert {kernel.target for kernel in usual if kernel.case == WALKS} == {USUAL[-1]}
    names = {kernel.kernel for kernel in usual}
    expected = {"attention._attend", "matmul._product", "deltanet._recur", "accept._accept"}
    assert expected | {"complete_step._complete_step"} <= names
    check(usual)


@pytest.mark.timeout(600)
def test_a_rows_sums_do_not_depend_on_how_many_rows_there_are(usual: list[Compiled]) -> None:
    """The instructions and the way that warps lie over a tile are one for all numbers of rows."""
    check_layouts(usual)


@pytest.mark.timeout(600)
def test_no_kernel_is_compiled_in_a_session(usual: list[Compiled]) -> None:
    """All that steps, commits, blocks and prefills launch was launched at the worker's start.

    There plain torch takes its place where compiling fails.
    """
    assert [kernel for kernel in usual if kernel.case in CASES and not kernel.prepared] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_all_packed_matrices_compile_for_all_targets(kind: str) -> None:
    """Every form, on every GPU that kernels run on, for tiles of all heights."""
    kernels = compiled_kernels([name for name, target in TARGETS.items() if target.lack is None], [], [kind], [1, 256])
    assert kernels
    check(kernels)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mixtures_of_experts_compile_for_all_targets() -> None:
    """For a row, a block, and so many rows that tiles of an expert are higher where they may be."""
    able = [name for name, target in TARGETS.items() if target.lack is None]
    kernels = compiled_kernels(able, [], [], [1, 16, 64, 512], experts=True)
    assert kernels
    check(kernels)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_choosers_compile_for_all_targets() -> None:
    """Those that walk through blocks, of one session and of several."""
    for name in (name for name, target in TARGETS.items() if target.lack is None):
        kernels = compiled_kernels([name], [], walks=True)
        assert kernels
        check(kernels)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_mixtures_of_experts_compile_for_all_targets(kind: str) -> None:
    """Every form, for as many rows; MXFP4 with biases and clamped gates."""
    for name in (name for name, target in TARGETS.items() if target.lack is None):
        kernels = compiled_kernels([name], [], [], [1, 16, 512], packed_experts=[kind])
        assert kernels
        check(kernels)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_all_cases_compile_for_all_targets(case: str) -> None:
    """Every element type and shape, on every GPU that kernels run on."""
    kernels = compiled_kernels(list(TARGETS), [case])
    assert kernels
    check(kernels)
    check_layouts(kernels)
    assert [kernel for kernel in kernels if not kernel.prepared] == []
