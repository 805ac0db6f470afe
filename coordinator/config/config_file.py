"""A YAML file whose keys are a command's flags, as defaults beneath the environment and the command line.

It may also draw a whole cluster, see `cluster_file.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from coordinator.config.cluster_file import check_rest, cluster_flags, read_cluster
from coordinator.config.yaml_file import read_yaml
from services.errors import InvalidArgument


def read_config(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Callback of `--config`. Raises BadParameter for what is no YAML and for a key that is no flag."""
    if path is None:
        return
    try:
        values = read_yaml(path) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{path} is not readable YAML: {error}") from error
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} must hold keys named after the flags, like target-devices: cpu,cpu")
    try:
        cluster, values = read_cluster(values)
        check_rest(cluster, values)
        values |= cluster_flags(cluster)
    except InvalidArgument as error:
        raise click.BadParameter(f"{path}: {error.message}") from error
    flags = {
        flag.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for flag in [*parameter.opts, *parameter.secondary_opts]
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        flag = flags.get(name)
        if flag is None or flag is option:
            command = context.info_name or "this command"
            raise click.BadParameter(f"{path}: {key!r} is not a flag of {command}; see flashsplit {command} --help")
        if flag.multiple and not isinstance(value, list | tuple):
            value = [value]
        elif isinstance(value, list) and not flag.multiple:
            value = ",".join(str(item) for item in value)
        if isinstance(value, bool) and f"--{name.replace('_', '-')}" in flag.secondary_opts:
            value = not value
        defaults[str(flag.name)] = value
    context.default_map = {**(context.default_map or {}), **defaults}
