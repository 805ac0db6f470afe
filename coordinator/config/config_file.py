"""A YAML file whose keys are a command's flags: defaults that the environment and the command line win over.

It may also draw a whole cluster, see `cluster_file.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from coordinator.config.cluster_file import check_plain_flags, cluster_flags, read_cluster
from coordinator.config.yaml_file import read_yaml
from services.errors import InvalidArgument


def read_config(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Make a file's values the defaults of a command's flags; the callback of `--config`.

    A key that is a flag of `serve` but not of this command is passed over. Raises BadParameter for a file that is not
    YAML, for any other key that is no flag, and for a cluster that makes no sense.
    """
    if path is None:
        return
    try:
        values = read_yaml(path) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{path} is not readable YAML: {error}") from error
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} must hold keys named after the flags, like target-devices: cpu,cpu")
    try:
        cluster, flags = read_cluster(values)
        check_plain_flags(cluster, flags)
        flags |= cluster_flags(cluster)
    except InvalidArgument as error:
        raise click.BadParameter(f"{path}: {error.message}") from error
    parameters = _names(context.command.params)
    defaults: dict[str, Any] = {}
    for key, value in flags.items():
        name = str(key).replace("-", "_")
        parameter = parameters.get(name)
        if parameter is None and name in _names(_serve_parameters(context)):
            # One file is for all commands: this flag is for serve alone.
            continue
        if parameter is None or parameter is option:
            command = context.info_name or "this command"
            raise click.BadParameter(f"{path}: {key!r} is not a flag of {command}; see flashsplit {command} --help")
        if parameter.multiple and not isinstance(value, list | tuple):
            value = [value]
        elif isinstance(value, list) and not parameter.multiple:
            value = ",".join(str(item) for item in value)
        if isinstance(value, bool) and f"--{name.replace('_', '-')}" in parameter.secondary_opts:
            value = not value
        defaults[str(parameter.name)] = value
    context.default_map = {**(context.default_map or {}), **defaults}


def _names(parameters: Iterable[click.Parameter]) -> dict[str, click.Parameter]:
    """Return parameters by all names that a file may use for them, with underscores."""
    return {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in parameters
        for name in [*parameter.opts, *parameter.secondary_opts]
    }


def _serve_parameters(context: click.Context) -> Sequence[click.Parameter]:
    """Return the parameters of `serve`, which belongs to the same program as the context's command."""
    program = context.find_root()
    serve = program.command.get_command(program, "serve") if isinstance(program.command, click.Group) else None
    return serve.params if serve is not None else ()
