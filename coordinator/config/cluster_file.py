"""The part of a configuration file that draws a whole cluster: workers with their roles, and certificates.

It is turned into the flags of the same meaning, so that there is one way to place a model. What stands under
`kubernetes` is for `flashsplit manifests`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from coordinator.cluster.placement import AUTO, parse_place
from coordinator.config.file_fields import Fields, read_fields
from services.errors import InvalidArgument
from services.messages.description import Role
from services.processes.launch import vendor_of

_PLACEMENT_FLAGS = (
    "target_devices",
    "target_layers",
    "target_layer_split",
    "draft_device",
    "prefill_device",
    "worker_command",
    "standby",
)
"""Flags, by parameter name, that `workers` stands for."""

_SECURITY_FLAGS = ("tls_cert", "tls_key", "tls_ca", "tls_server_name", "tls_crl", "cluster_token_file")
"""Flags, by parameter name, that `certificates` stands for."""

_RANGE = re.compile(r"\s*\d{1,9}\s*:\s*\d{1,9}\s*")


def _check_roles(value: list[str]) -> list[str]:
    """Return the roles without repeats. Raises ValueError for none, and for an unknown one."""
    known = [role.value for role in Role]
    if not value or any(role not in known for role in value):
        raise ValueError(f"these are not some of {', '.join(known)}")
    return list(dict.fromkeys(value))


def _check_range(value: str) -> str:
    """Return a half-open range of layers as it is written. Raises ValueError for another form."""
    if _RANGE.fullmatch(value) is None:
        raise ValueError("this is not FIRST:BEHIND")
    return value


class WorkerEntry(Fields):
    """One worker.

    at: a device expression, for a worker that is started here, or the address of a running one. roles: what the worker
    is used for. layers: FIRST:BEHIND, a half-open range; share: a proportional weight; targets have one of the two or
    neither. command: the program, for a worker that is started here. standby: it waits to take the place of a lost
    stage.
    """

    at: str = Field(examples=["cuda:0 or gpu-a:7001"])
    roles: Annotated[list[str], AfterValidator(_check_roles)] = Field(
        [Role.TARGET.value], examples=[["target", "draft"]]
    )
    layers: Annotated[str, AfterValidator(_check_range)] | None = Field(None, examples=["0:12"])
    share: float | None = Field(None, gt=0, allow_inf_nan=False, examples=[0.3])
    command: str | None = Field(None, examples=["/opt/rocm-env/bin/flashsplit-worker"])
    standby: bool = False
    kubernetes: dict[str, Any] = {}


class Certificates(Fields):
    """Files with which the processes of a cluster prove to each other who they are."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    server_name: str | None = None
    crl: str | None = None
    token_file: str | None = None


class ClusterFile(Fields):
    """What a file says beside plain flags; `kubernetes` is checked where manifests are written."""

    workers: list[WorkerEntry] = Field(default_factory=list, min_length=1)
    certificates: Certificates | None = None
    kubernetes: dict[str, Any] = {}


def read_cluster(values: dict[str, Any]) -> tuple[ClusterFile, dict[str, Any]]:
    """Return the cluster that a file's values draw, and the other values: plain flags.

    Raises InvalidArgument naming the field that has another form than it should, and what it has.
    """
    names = ClusterFile.model_fields
    drawn = {name: values[name] for name in names if values.get(name) is not None}
    plain = {name: value for name, value in values.items() if name not in names}
    return read_fields(ClusterFile, drawn), plain


def cluster_flags(cluster: ClusterFile) -> dict[str, Any]:
    """Return the flags that a cluster stands for: values by parameter name.

    Raises InvalidArgument for workers that cannot be placed together.
    """
    flags: dict[str, Any] = {}
    if cluster.workers:
        flags |= _placement_flags(cluster.workers)
    if cluster.certificates is not None:
        files = cluster.certificates.model_dump(exclude_none=True)
        flags |= {"cluster_token_file" if name == "token_file" else f"tls_{name}": file for name, file in files.items()}
    return flags


def check_plain_flags(cluster: ClusterFile, plain: Mapping[str, Any]) -> None:
    """Check the plain flags of a file, by the names that it writes, beside the cluster that it draws.

    Raises InvalidArgument for a flag that says again what `workers` or `certificates` says, and for a role whose
    checkpoint is not named.
    """
    names = {name.replace("-", "_"): name for name in plain}
    for role, key in ((Role.DRAFT, "draft"), (Role.COMPRESS, "prefill-drafter")):
        if any(role in worker.roles for worker in cluster.workers) and key.replace("-", "_") not in names:
            raise InvalidArgument(
                f"workers: one has the role {role} and {key} is missing: name the checkpoint with {key}: DIR", field=key
            )
    is_divided = any(worker.layers is not None or worker.share is not None for worker in cluster.workers)
    for part, flags in (("workers", _PLACEMENT_FLAGS), ("certificates", _SECURITY_FLAGS)):
        for flag in flags:
            if flag == "target_layer_split" and not is_divided and plain.get(names.get(flag, "")) == AUTO:
                # The one word that workers have no way to say.
                continue
            if getattr(cluster, part) and flag in names:
                raise InvalidArgument(f"{names[flag]} says again what {part} says: give one of them", field=names[flag])


def _placement_flags(workers: list[WorkerEntry]) -> dict[str, Any]:
    """Return the flags that the workers stand for. Raises InvalidArgument for workers that don't fit together."""
    for index, worker in enumerate(workers):
        _check_worker(worker, f"workers[{index}]")
    standbys = [worker for worker in workers if worker.standby]
    workers = [worker for worker in workers if not worker.standby]
    stages = [worker for worker in workers if Role.TARGET in worker.roles]
    if not stages:
        raise InvalidArgument("workers: none has the role target; give it to those that hold layers", field="workers")
    flags: dict[str, Any] = {"target_devices": ",".join(worker.at for worker in stages)}
    for field, flag in (("layers", "target_layers"), ("share", "target_layer_split")):
        values = [getattr(worker, field) for worker in stages]
        if any(value is not None for value in values):
            if None in values:
                raise InvalidArgument(
                    f"workers[{workers.index(stages[values.index(None)])}] has no {field} and others do: give all "
                    "targets one, or none",
                    field="workers",
                )
            flags[flag] = ",".join(str(value) for value in values)
    draft, reader = _only_worker(workers, Role.DRAFT), _only_worker(workers, Role.COMPRESS)
    if draft is not None and draft is not stages[-1]:
        if Role.TARGET in draft.roles and _is_local(draft):
            raise InvalidArgument(
                f"workers[{workers.index(draft)}]: {draft.at} is target and draft; a draft beside a stage sits beside "
                "the last one: give the role to the last target, or to a worker of its own",
                field="workers",
            )
        flags["draft_device"] = draft.at
    if reader is not None and reader is not stages[0]:
        flags["prefill_device"] = reader.at
    if standbys:
        flags["standby"] = ",".join(worker.at for worker in standbys)
    commands = {
        f"{vendor_of(worker.at)}={worker.command}" for worker in (*workers, *standbys) if worker.command is not None
    }
    if commands:
        flags["worker_command"] = tuple(sorted(commands))
    return flags


def _is_local(worker: WorkerEntry) -> bool:
    """Return whether a worker is started here."""
    return parse_place(worker.at, "at").devices is not None


def _check_worker(worker: WorkerEntry, place: str) -> None:
    """Raise InvalidArgument for fields of one worker that contradict each other. place: where it stands in the file."""
    parse_place(worker.at, f"{place}.at")
    if worker.layers is not None and worker.share is not None:
        raise InvalidArgument(f"{place} has layers and a share: give one of them", field=place)
    if worker.standby and (worker.layers is not None or worker.share is not None or Role.TARGET not in worker.roles):
        raise InvalidArgument(
            f"{place} stands by, for any stage: give it the role target, and neither layers nor a share", field=place
        )
    if Role.TARGET not in worker.roles and (worker.layers is not None or worker.share is not None):
        raise InvalidArgument(f"{place} has layers and not the role target: leave them out", field=place)
    if worker.command is not None and not _is_local(worker):
        raise InvalidArgument(
            f"{place}.command has no effect on {worker.at}, which runs already: leave it out", field=f"{place}.command"
        )


def _only_worker(workers: list[WorkerEntry], role: Role) -> WorkerEntry | None:
    """Return the worker with a role that one may have, None without any. Raises InvalidArgument for several."""
    matches = [worker for worker in workers if role in worker.roles]
    if len(matches) > 1:
        raise InvalidArgument(f"workers: {len(matches)} have the role {role}: give it to one", field="workers")
    return matches[0] if matches else None
