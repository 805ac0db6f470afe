"""The wheel: what an installed flashsplit has of its own, away from any checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coordinator.cli.commands.serve import serve
from coordinator.manifests.overlay import overlay
from coordinator.manifests.reading import read_serve_file
from tests.deploy.rendered import KUBERNETES, of_kind, render
from tests.e2e.conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that holds what the wheel has."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("flashsplit-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "packages")
    return folder / "packages"


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed `flashsplit` in a folder that holds nothing of a checkout."""
    program = "import coordinator.__main__ as program, sys; print(program.__file__, file=sys.stderr); program.main()"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.startswith(str(installed)), done.stderr
    return done


@pytest.mark.slow
def test_manifests_need_no_checkout(installed: Path, tmp_path: Path) -> None:
    """What every cluster has alike is written with the overlay, which is the same as in a checkout but for the way
    there; written again it replaces itself."""
    file = tmp_path / "cluster.yaml"
    file.write_text("model: /models/a\nworkers: [{at: cpu}, {at: cpu}]\n")
    out = tmp_path / "overlay"
    for _ in range(2):
        done = run(installed, tmp_path, "manifests", "--config", str(file), "--out", str(out))
        assert done.returncode == 0, done.stderr
    written = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*.yaml")}
    expected = overlay(read_serve_file(file, serve.params), out, None, tmp_path)
    assert written == {str(path): text for path, text in expected.items()}
    for path in (KUBERNETES / "base").rglob("*.yaml"):
        name = f"base/{path.relative_to(KUBERNETES / 'base')}"
        assert written[name].partition("\n")[2] == path.read_text()
    assert "- base/coordinator\n" in written["kustomization.yaml"]
    assert "- ../base/worker\n" in written["worker-0/kustomization.yaml"]
    assert set(of_kind(render(out), "StatefulSet")) == {"worker-0", "worker-1"}
