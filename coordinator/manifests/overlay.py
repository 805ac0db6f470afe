"""The files of an overlay, and writing them: files of an earlier overlay are replaced, those of others are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from coordinator.config.file_fields import read_fields
from coordinator.manifests.patches import claims, coordinator_patches, worker_patches
from coordinator.manifests.pods import ClusterPods
from coordinator.manifests.reading import ServeFile
from coordinator.manifests.serving import serve_flags
from coordinator.manifests.workers import pod_workers
from services.errors import InvalidArgument

HEADER = "# Written by flashsplit manifests: change the cluster file and write it again.\n"
BASE = "base"
"""Where in an overlay's directory the objects stand that every cluster has alike, if they are written with it."""

_PACKAGED_BASE = Path(__file__).with_name(BASE)
# In a checkout they are where the other manifests are.
_SHIPPED_BASE = (
    _PACKAGED_BASE if _PACKAGED_BASE.is_dir() else Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
)
_KUSTOMIZE = "kustomize.config.k8s.io/v1beta1"


def overlay(file: ServeFile, directory: Path, base: Path | None, beside: Path) -> dict[PurePosixPath, str]:
    """Return file contents by their paths in the overlay's directory.

    base: the objects that every cluster has alike, to refer to; None to have them among the files. beside: the
    directory of the cluster file, from where it names components. Raises InvalidArgument naming the field, its value
    and what to write.
    """
    shared: dict[PurePosixPath, str] = {}
    if base is None:
        shared = {
            PurePosixPath(BASE, path.relative_to(_SHIPPED_BASE)): HEADER + path.read_text(encoding="utf-8")
            for path in _SHIPPED_BASE.glob("*/*.yaml")
        }
        base = directory / BASE
    else:
        _check_base(base)
    pods = read_fields(ClusterPods, file.cluster.kubernetes, "kubernetes")
    workers = pod_workers(file)
    files: dict[str, list[Any]] = {"serve.yaml": [serve_flags(file, pods, workers)]}
    files["coordinator.yaml"] = coordinator_patches(file, pods)
    files["claims.yaml"] = claims(file, pods)
    top: dict[str, Any] = {
        "apiVersion": _KUSTOMIZE,
        "kind": "Kustomization",
        "namespace": pods.namespace,
        "resources": [f"{_relative(directory, base)}/coordinator", *(worker.name for worker in workers)],
        "components": [_component(directory, beside, name) for name in pods.components],
        "configMapGenerator": [{"name": "serve", "files": ["serve.yaml"]}],
        "patches": [{"path": "coordinator.yaml"}],
    }
    if files["claims.yaml"]:
        top["resources"].append("claims.yaml")
    files["kustomization.yaml"] = [{key: value for key, value in top.items() if value}]
    for worker in workers:
        files[f"{worker.name}/worker.yaml"] = worker_patches(file, pods, worker)
        files[f"{worker.name}/kustomization.yaml"] = [
            {
                "apiVersion": _KUSTOMIZE,
                "kind": "Kustomization",
                "resources": [f"{_relative(directory / worker.name, base)}/worker"],
                "nameSuffix": f"-{worker.index}",
                "labels": [
                    {"pairs": {"app.kubernetes.io/instance": worker.name}, "includeSelectors": True},
                ],
                "patches": [{"path": "worker.yaml"}],
            }
        ]
    return shared | {PurePosixPath(path): _text(documents) for path, documents in files.items() if documents}


def write_overlay(directory: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write the files into a directory, which is made if need be; remove those of an earlier overlay that are gone.

    Raises InvalidArgument, before anything is written, for a file in the way that somebody else has written.
    """
    old = {path for pattern in ("*.yaml", "worker-*/*.yaml", f"{BASE}/*/*.yaml") for path in directory.glob(pattern)}
    for path in files:
        existing = directory / path
        if existing.exists() and not existing.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise InvalidArgument(
                f"--out {str(directory)!r}: {path} is there and not of flashsplit manifests: move it away, or name "
                "another directory",
                field="--out",
            )
    try:
        for stale in old - {directory / path for path in files}:
            if stale.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
                stale.unlink()
                if stale.parent != directory and not any(stale.parent.iterdir()):
                    stale.parent.rmdir()
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--out {error.filename}: {error.strerror}", field="--out") from error


def _check_base(base: Path) -> None:
    """Raise InvalidArgument for a directory that lacks what overlays refer to."""
    for part in ("coordinator", "worker"):
        if not (base / part / "kustomization.yaml").is_file():
            raise InvalidArgument(
                f"--base {str(base)!r} has no {part}/kustomization.yaml: name deploy/kubernetes/base of a checkout of "
                "flashsplit, or leave it out to have its files written with the overlay",
                field="--base",
            )


def _component(directory: Path, beside: Path, name: str) -> str:
    """Return the path of a component from the overlay. Raises InvalidArgument for one that is not there."""
    if not (beside / name / "kustomization.yaml").is_file():
        raise InvalidArgument(
            f"kubernetes.components has {name!r}, and {beside / name} has no kustomization.yaml: name a component's "
            "directory, from the cluster file's",
            field="kubernetes.components",
        )
    return _relative(directory, beside / name)


def _relative(start: Path, end: Path) -> str:
    """Return the way from a directory to another one; Kustomize takes no absolute paths."""
    return Path(os.path.relpath(end.resolve(), start.resolve())).as_posix()


class _PlainDumper(yaml.SafeDumper):
    """A dumper that writes a part out wherever it stands, in place of a reference to where it stood first."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(documents: Sequence[Any]) -> str:
    """Return the content of a file that holds these documents."""
    return HEADER + yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)
