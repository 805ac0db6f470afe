"""A cluster file as manifests need it: serve's flags by their names, and the workers that it draws.

What the values of flags mean is left to those who use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from coordinator.config.cluster_file import ClusterFile, check_plain_flags, cluster_flags, read_cluster
from coordinator.config.yaml_file import read_yaml
from services.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A file for `flashsplit serve`.

    flags: serve's plain flags by their names without the leading dashes; `no-…` stands as its opposite.
    """

    flags: Mapping[str, Any]
    cluster: ClusterFile


def read_serve_file(path: Path, parameters: Iterable[click.Parameter]) -> ServeFile:
    """Read a cluster file. parameters: those of `flashsplit serve`, whose flags the file may set.

    Raises InvalidArgument naming the field, its value and what would be accepted."""
    try:
        values = read_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"--config {path} is not readable YAML: {error}", field="--config") from error
    if not isinstance(values, dict):
        raise InvalidArgument(
            f"{path} is {values!r}; it must be a mapping: keys named after the flags of serve, and workers",
            field="--config",
        )
    cluster, rest = read_cluster(values)
    if not cluster.workers:
        raise InvalidArgument(
            f"{path}: workers is missing; write a list with an entry for each worker, like - at: cuda:0",
            field="workers",
        )
    flags = _flags(rest, path, parameters)
    check_plain_flags(cluster, flags)
    cluster_flags(cluster)
    return ServeFile(flags, cluster)


def _flags(values: Mapping[str, Any], path: Path, parameters: Iterable[click.Parameter]) -> dict[str, Any]:
    """Return values by the first names of their flags. Raises InvalidArgument for a key that is no flag."""
    known: dict[str, tuple[str, bool]] = {}
    for parameter in parameters:
        for names, positive in ((parameter.opts, True), (parameter.secondary_opts, False)):
            known |= {name.lstrip("-"): (parameter.opts[0].lstrip("-"), positive) for name in names}
    flags = {}
    for key, value in values.items():
        name, positive = known.get(str(key).replace("_", "-"), ("config", True))
        if name == "config":
            raise InvalidArgument(
                f"{path}: {key!r} is neither a flag of serve nor workers, certificates or kubernetes; see flashsplit "
                "serve --help",
                field=str(key),
            )
        flags[name] = value if positive else not value
    return flags
