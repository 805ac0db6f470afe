"""Kubernetes objects as `kubectl kustomize` renders them; tests that need them are skipped where it is missing."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("demo-cpu", "nvidia", "nvidia-amd-cpu")
LEADER_WORKER_SET = KUBERNETES / "leader-worker-set"

Object = dict[str, Any]


@functools.cache
def render(directory: Path) -> tuple[Object, ...]:
    """All objects of a kustomization."""
    command = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    if shutil.which(command[0]) is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], kind: str) -> dict[str, Object]:
    """By name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def pods(objects: tuple[Object, ...]) -> dict[str, Object]:
    """The pod templates of all workloads that serve, by the workload's name."""
    found = {
        name: item["spec"]["template"]
        for kind in ("Deployment", "StatefulSet")
        for name, item in of_kind(objects, kind).items()
    }
    for name, item in of_kind(objects, "LeaderWorkerSet").items():
        template = item["spec"]["leaderWorkerTemplate"]
        found |= {f"{name}-0": template["leaderTemplate"]}
        found |= {f"{name}-0-{index}": template["workerTemplate"] for index in range(1, template["size"])}
    return found
