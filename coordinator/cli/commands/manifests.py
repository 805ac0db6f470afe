"""`flashsplit manifests`: a cluster file as an overlay for Kustomize."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from coordinator.cli.command import Command
from coordinator.cli.commands.serve import serve
from coordinator.cli.option_groups import with_options
from coordinator.config.file_fields import read_fields
from coordinator.manifests.overlay import overlay, write_overlay
from coordinator.manifests.pods import ClusterPods
from coordinator.manifests.reading import ServeFile, read_serve_file
from coordinator.manifests.workers import has_token

_EPILOG = """Examples:

\b
  flashsplit manifests --config cluster.yaml --out overlay
  kubectl apply -k overlay
"""


@click.command(cls=Command, epilog=_EPILOG)
@with_options
@click.option(
    "--config",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    help="The cluster file, as flashsplit serve takes it.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write the overlay.  [default: beside the cluster file]",
)
@click.option(
    "--base",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the objects are that every cluster has alike, such as deploy/kubernetes/base of a checkout; the "
    "overlay refers to them.  [default: they are written with it, in base/]",
)
async def manifests(config: Path, out: Path | None, base: Path | None) -> None:
    """Write a Kustomize overlay that runs a cluster file on Kubernetes.

    Each worker becomes a StatefulSet with a certificate of its own, the coordinator a Deployment. What the file says of
    addresses, certificates and keys is for bare hosts: in the cluster, names are made and cert-manager's and your
    Secrets are mounted.
    """
    file = read_serve_file(config, serve.params)
    directory = out or config.parent
    write_overlay(directory, overlay(file, directory, base, config.parent))
    click.echo("\n".join(instructions(file, directory)))


def instructions(file: ServeFile, directory: Path) -> list[str]:
    """Return what to type next."""
    pods = read_fields(ClusterPods, file.cluster.kubernetes, "kubernetes")
    space = ["--namespace", pods.namespace]
    keys = ["--from-file=api-keys=KEYS.txt", "--from-literal=metrics=ONE-OF-THEM"]
    lines = [
        f"Overlay in {directory}. Once, with cert-manager in the cluster:",
        f"  kubectl create namespace {pods.namespace}",
        f"  kubectl create secret generic api-keys {shlex.join([*keys, *space])}",
    ]
    if has_token(file):
        lines.append(f"  kubectl create secret generic cluster-token {shlex.join(['--from-file=token=TOKEN', *space])}")
    return [*lines, "Then, and after every change:", f"  kubectl apply -k {shlex.quote(str(directory))}"]
