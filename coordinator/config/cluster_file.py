"""The part of a configuration file that draws a whole cluster: workers with their roles, and certificates.

Turned into the flags of the same meaning, so that there is one way to place a model. What stands under `kubernetes` is
for `flashsplit manifests`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from coordinator.cluster.placement import AUTO, parse_place
from coordinator.config.file_fields import Fields, read_fields
from services.errors import InvalidArgument
from services.messages.description import Role
from services.processes.launch import vendor_of

_PLACING = ("target_devices", "target_layers", "target_layer_split", "draft_device", "prefill_device", "worker_command")


_RANGE = re.compile(r"\s*\d{1,9}\s*:\s*\d{1,9}\s*")
_SECURING = ("tls_cert", "tls_key", "tls_ca", "tls_server_name", "cluster_token_file")


def _roles(value: list[str]) -> list[str]:
    known = [role.value for role in Role]
    if not value or any(role not in known for role in value):
        raise ValueError(f"these are not some of {', '.join(known)}")
    return list(dict.fromkeys(value))


def _range(value: str) -> str:
    if _RANGE.fullmatch(value) is None:
        raise ValueError("this is not FIRST:BEHIND")
    return value


class WorkerEntry(Fields):
    """One worker. at: a device expression, for a worker that is started here, or a running one's address.

    layers: FIRST:BEHIND; share: a proportional weight; for targets, one of the two or neither. command: the program,
    for a worker that is started here.
    """

    at: str = Field(examples=["cuda:0 or gpu-a:7001"])
    roles: Annotated[list[str], AfterValidator(_roles)] = Field([Role.TARGET.value], examples=[["target", "draft"]])
    layers: Annotated[str, AfterValidator(_range)] | None = Field(None, examples=["0:12"])
    share: float | None = Field(None, gt=0, allow_inf_nan=False, examples=[0.3])
    command: str | None = Field(None, examples=["/opt/rocm-env/bin/flashsplit-worker"])
    kubernetes: dict[str, Any] = {}


class Certificates(Fields):
    """Files for the edges between processes."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    server_name: str | None = None
    token_file: str | None = None


class ClusterFile(Fields):
    """What a file says beside plain flags."""

    workers: list[WorkerEntry] = Field(default_factory=list, min_length=1)
    certificates: Certificates | None = None
    kubernetes: dict[str, Any] = {}


def read_cluster(values: dict[str, Any]) -> tuple[ClusterFile, dict[str, Any]]:
    """The cluster that a file's values draw, and the rest of them.

    Raises InvalidArgument naming what has another form than it should.
    """
    names = ("workers", "certificates", "kubernetes")
    own = {name: values[name] for name in names if values.get(name) is not None}
    rest = {name: value for name, value in values.items() if name not in names}
    return read_fields(ClusterFile, own), rest


def cluster_flags(cluster: ClusterFile) -> dict[str, Any]:
    """Flag (by parameter name) -> value. Raises InvalidArgument for workers that cannot be placed together."""
    flags: dict[str, Any] = {}
    if cluster.workers:
        flags |= _placing(cluster.workers)
    if cluster.certificates is not None:
        given = cluster.certificates.model_dump(exclude_none=True)
        flags |= {"cluster_token_file" if name == "token_file" else f"tls_{name}": at for name, at in given.items()}
    return flags


def check_rest(cluster: ClusterFile, rest: dict[str, Any]) -> None:
    """Raises InvalidArgument where a plain key says again what `workers` or `certificates` says, and where a role lacks
    its checkpoint."""
    names = {name.replace("-", "_"): name for name in rest}
    for role, key in ((Role.DRAFT, "draft"), (Role.COMPRESS, "prefill-drafter")):
        if any(role in worker.roles for worker in cluster.workers) and key.replace("-", "_") not in names:
            raise InvalidArgument(
                f"workers: one has the role {role} and {key} is missing: name the checkpoint with {key}: DIR", field=key
            )
    divided = any(worker.layers is not None or worker.share is not None for worker in cluster.workers)
    for part, flags in (("workers", _PLACING), ("certificates", _SECURING)):
        for flag in flags:
            if flag == "target_layer_split" and not divided and rest.get(names.get(flag, "")) == AUTO:
                # The one word that workers have no way to say.
                continue
            if getattr(cluster, part) and flag in names:
                raise InvalidArgument(f"{names[flag]} says again what {part} says: give one of them", field=names[flag])


def _placing(workers: list[WorkerEntry]) -> dict[str, Any]:
    for index, worker in enumerate(workers):
        _check(worker, f"workers[{index}]")
    stages = [worker for worker in workers if Role.TARGET in worker.roles]
    if not stages:
        raise InvalidArgument("workers: none has the role target; give it to those that hold layers", field="workers")
    flags: dict[str, Any] = {"target_devices": ",".join(worker.at for worker in stages)}
    for field, flag in (("layers", "target_layers"), ("share", "target_layer_split")):
        given = [getattr(worker, field) for worker in stages]
        if any(value is not None for value in given):
            if None in given:
                raise InvalidArgument(
                    f"workers[{workers.index(stages[given.index(None)])}] has no {field} and others do: give all "
                    "targets one, or none",
                    field="workers",
                )
            flags[flag] = ",".join(str(value) for value in given)
    draft, reader = _one(workers, Role.DRAFT), _one(workers, Role.COMPRESS)
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
    commands = {f"{vendor_of(worker.at)}={worker.command}" for worker in workers if worker.command is not None}
    if commands:
        flags["worker_command"] = tuple(sorted(commands))
    return flags


def _is_local(worker: WorkerEntry) -> bool:
    return parse_place(worker.at, "at").devices is not None


def _check(worker: WorkerEntry, place: str) -> None:
    parse_place(worker.at, f"{place}.at")
    if worker.layers is not None and worker.share is not None:
        raise InvalidArgument(f"{place} has layers and a share: give one of them", field=place)
    if Role.TARGET not in worker.roles and (worker.layers is not None or worker.share is not None):
        raise InvalidArgument(f"{place} has layers and not the role target: leave them out", field=place)
    if worker.command is not None and not _is_local(worker):
        raise InvalidArgument(
            f"{place}.command has no effect on {worker.at}, which runs already: leave it out", field=f"{place}.command"
        )


def _one(workers: list[WorkerEntry], role: Role) -> WorkerEntry | None:
    having = [worker for worker in workers if role in worker.roles]
    if len(having) > 1:
        raise InvalidArgument(f"workers: {len(having)} have the role {role}: give it to one", field="workers")
    return having[0] if having else None
