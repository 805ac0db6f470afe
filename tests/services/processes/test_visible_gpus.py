"""What a child sees of the GPUs: its own, under its parent's numbers."""

from __future__ import annotations

import pytest

from services.processes.visible_gpus import VARIABLE, environment_for, visible_numbers

BOTH = {
    "PATH": "/bin",
    "CUDA_VISIBLE_DEVICES": "4,GPU-abc,6",
    "HIP_VISIBLE_DEVICES": "1",
    "ROCR_VISIBLE_DEVICES": "0,1",
}


@pytest.mark.parametrize(
    ("devices", "parent", "child"),
    [
        ("cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "1", VARIABLE: "1"}),
        ("cuda:3+cuda:0", {}, {"CUDA_VISIBLE_DEVICES": "3,0", VARIABLE: "3,0"}),
        ("hip:2", {}, {"HIP_VISIBLE_DEVICES": "2", VARIABLE: "2"}),
        ("cpu", {}, {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
        ("cpu+cpu", {}, {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
        ("cuda:1+cuda:2", BOTH, {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-abc,6", VARIABLE: "1,2"}),
        ("hip:0", BOTH, {"PATH": "/bin", "HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "0,1", VARIABLE: "0"}),
        ("cpu", BOTH, {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
        ("best", BOTH, BOTH),
        # Hidden from the parent: nothing that the child could be given in its place.
        ("cuda:3", {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "", VARIABLE: "0"}),
    ],
)
def test_environment(devices: str, parent: dict[str, str], child: dict[str, str]) -> None:
    """Its own vendor's variable with its own GPUs, and no other vendor's."""
    assert environment_for(devices, parent) == child


def test_the_child_knows_the_numbers() -> None:
    """The child reads which numbers its GPUs have for its parent; nothing is known where nothing was hidden."""
    assert visible_numbers(environment_for("cuda:3+cuda:0", {})) == [3, 0]
    assert visible_numbers({}) is None
