"""A cluster file as manifests need it: serve's flags by their names, the workers, and what Kubernetes alone is told.

Refuses what is no flag or no field, and values of another kind; what the values mean is for those who use them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coordinator.placement import Place, parse_place
from coordinator.yaml_file import read_yaml
from services.description import Role
from services.errors import InvalidArgument
from services.layers import LayerRange

_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})")
_ENTRY_FIELDS = ("at", "roles", "layers", "share", "command", "kubernetes")
_CERTIFICATE_FIELDS = ("cert", "key", "ca", "server-name", "token-file")


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One of `workers`. at: devices to start a worker on, or where one runs. kubernetes: what serve ignores."""

    at: Place
    roles: tuple[Role, ...] = (Role.TARGET,)
    layers: LayerRange | None = None
    share: float | None = None
    command: tuple[str, ...] = ()
    kubernetes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """flags: serve's, by their names without the leading dashes. certificates: the `tls-` flags by shorter names."""

    flags: Mapping[str, Any]
    workers: tuple[WorkerEntry, ...]
    certificates: Mapping[str, str] = field(default_factory=dict)
    kubernetes: Mapping[str, Any] = field(default_factory=dict)


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises InvalidArgument naming the field, its value and what would be accepted."""
    try:
        content = read_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"--config {path} is not readable YAML: {error}", field="--config") from error
    values = dict(_mapping(content, str(path), "keys named after the flags of serve, and workers"))
    entries = values.pop("workers", None)
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(
            f"{path}: workers is {entries!r}; write a list with an entry for each worker, like - at: cuda:0",
            field="workers",
        )
    certificates = values.pop("certificates", None) or {}
    _known(_mapping(certificates, "certificates", ", ".join(_CERTIFICATE_FIELDS)), _CERTIFICATE_FIELDS, "certificates")
    kubernetes = _mapping(values.pop("kubernetes", None) or {}, "kubernetes", "fields")
    return ClusterFile(
        _flags(values, path),
        tuple(_entry(entry, f"workers[{index}]") for index, entry in enumerate(entries)),
        {name: str(value) for name, value in certificates.items()},
        kubernetes,
    )


def _flags(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """By their first names; a --no-… as its opposite."""
    from coordinator.commands.serve import serve

    known: dict[str, tuple[str, bool]] = {}
    for parameter in serve.params:
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


def _entry(value: object, name: str) -> WorkerEntry:
    entry = _mapping(value, name, ", ".join(_ENTRY_FIELDS))
    _known(entry, _ENTRY_FIELDS, name)
    if not isinstance(entry.get("at"), str):
        raise InvalidArgument(
            f"{name}.at is {entry.get('at')!r}; write devices to start the worker on, like cuda:0 or cpu, or where it "
            "runs, like gpu-a:7001",
            field=f"{name}.at",
        )
    share = entry.get("share")
    if share is not None and (not isinstance(share, int | float) or isinstance(share, bool)):
        raise InvalidArgument(f"{name}.share is {share!r}; write a number above 0, like 0.3", field=f"{name}.share")
    if share is not None and entry.get("layers") is not None:
        raise InvalidArgument(
            f"{name} has layers {entry['layers']!r} and share {share!r}: give one of them", field=f"{name}.share"
        )
    command = entry.get("command", [])
    if not isinstance(command, str | list):
        raise InvalidArgument(
            f"{name}.command is {command!r}; write how a worker is started, like /opt/rocm/bin/flashsplit-worker",
            field=f"{name}.command",
        )
    return WorkerEntry(
        parse_place(entry["at"], f"{name}.at"),
        _roles(entry.get("roles", [Role.TARGET.value]), f"{name}.roles"),
        _layers(entry.get("layers"), f"{name}.layers"),
        None if share is None else float(share),
        tuple(command.split() if isinstance(command, str) else map(str, command)),
        _mapping(entry.get("kubernetes") or {}, f"{name}.kubernetes", "fields"),
    )


def _roles(value: object, name: str) -> tuple[Role, ...]:
    known = [role.value for role in Role]
    if not isinstance(value, list) or not value or any(role not in known for role in value):
        raise InvalidArgument(f"{name} is {value!r}; write a list of {', '.join(known)}", field=name)
    return tuple(Role(role) for role in dict.fromkeys(value))


def _layers(value: object, name: str) -> LayerRange | None:
    if value is None:
        return None
    found = _RANGE.fullmatch(str(value).replace(" ", ""))
    if found is None:
        # YAML reads 10:20 as a number of minutes.
        hint = f"quote it: layers: '{value // 60}:{value % 60}'" if isinstance(value, int) else "like '0:12'"
        raise InvalidArgument(f"{name} is {value!r}; write FIRST:BEHIND, {hint}", field=name)
    return LayerRange(int(found[1]), int(found[2]))


def _mapping(value: object, name: str, wanted: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidArgument(f"{name} is {value!r}; it must be a mapping: {wanted}", field=name)
    return value


def _known(given: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    for key in given:
        if key not in known:
            raise InvalidArgument(f"{name}.{key} is unknown; {name} may have {', '.join(known)}", field=f"{name}.{key}")
