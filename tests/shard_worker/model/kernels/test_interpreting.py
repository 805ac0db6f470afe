"""The kernels' tests on a machine without a GPU: Triton interprets the kernels, number by number, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LEFT_OUT = "recurrent_layers_in_chunks and 130"
"""Three chunks of recurrent layers take half a minute this way."""

ALIKE = (
    "(recurrent_layers_in_chunks and (64- or 65-16x16)) or gemma4-sharing or (attends_alone and dtype1 and not 64) or "
    "(attends_alone and dtype0 and (256 or 128 or 32)) or "
    "(order_in_which_lanes_multiply and (nvfp4-2 or q6_k-2 or q4_k-2 or q8_0-2 or q6_k-4 or nvfp4-0 or q4_k-0))"
)
"""Tests of which others differ in a shape alone: together they take as long as a third of all."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' tests run on this machine's GPU")
@pytest.mark.parametrize(
    "left_out",
    [pytest.param(f"({LEFT_OUT}) or {ALIKE}", id="some"), pytest.param(LEFT_OUT, id="all", marks=pytest.mark.slow)],
)
def test_kernels_compute_what_plain_torch_does(left_out: str) -> None:
    """Attention, keys of eight bits, products, norms and recurrent layers in chunks; in a process of its own, as Triton
    decides when kernels are defined."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", f"not ({left_out})"]
    # What overflows in numpy does in a kernel.
    command += ["-W", "ignore::RuntimeWarning", str(Path(__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[4]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
