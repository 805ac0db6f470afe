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


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' tests run on this machine's GPU")
@pytest.mark.parametrize(
    "chosen",
    [pytest.param("gpu and not slow", id="some"), pytest.param("gpu", id="all", marks=pytest.mark.slow)],
)
def test_kernels_compute_what_plain_torch_does(chosen: str) -> None:
    """Attention, keys of eight bits, products, norms and recurrent layers in chunks; in a process of its own, as Triton
    decides when kernels are defined. Every kernel by default, of cases that differ in a shape alone the quickest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, "-k", f"not ({LEFT_OUT})"]
    # What overflows in numpy does in a kernel.
    command += ["-W", "ignore::RuntimeWarning", str(Path(__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[4]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
