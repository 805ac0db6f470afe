"""The workers of a cluster file as pods: their names, devices, roles and command lines."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from coordinator.cluster.placement import WorkerPlace, parse_place
from coordinator.config.cluster_file import WorkerEntry
from coordinator.config.file_fields import read_fields
from coordinator.manifests.pods import WorkerPod
from coordinator.manifests.reading import ServeFile
from services.errors import InvalidArgument
from services.messages.description import Role

SHARD_PORT, HEALTH_PORT = 7001, 7002
TLS, TOKEN = "/etc/flashsplit/tls", "/etc/flashsplit/token/token"
RESOURCES = {"cuda": "nvidia.com/gpu", "hip": "amd.com/gpu"}
DRAIN_S = 60.0
"""How long answers may take to finish where the file doesn't say: serve's own default."""


@dataclass(frozen=True, slots=True)
class PodWorker:
    """One worker as a pod. device: as flashsplit-worker takes it inside the pod; roles: what it must offer."""

    index: int
    entry: WorkerEntry
    pod: WorkerPod
    device: str
    roles: tuple[Role, ...]

    @property
    def name(self) -> str:
        """The name of its objects, and its host name in the cluster."""
        return f"worker-{self.index}"

    @property
    def address(self) -> str:
        """The address by which the coordinator and other workers reach it."""
        return f"{self.name}:{SHARD_PORT}"

    @property
    def vendor(self) -> str:
        """The vendor of its devices: cpu, cuda or hip."""
        return self.device.partition(":")[0]

    @property
    def gpus(self) -> int:
        """The number of its GPUs."""
        return 0 if self.vendor == "cpu" else self.device.count("+") + 1

    def arguments(self, file: ServeFile) -> list[str]:
        """Return the command line of flashsplit-worker."""
        prefix_bytes = 0 if file.flags.get("prefix-cache") is False else file.flags.get("prefix-cache-bytes")
        flags: dict[str, object] = {
            "listen": f"0.0.0.0:{SHARD_PORT}",
            "health-port": HEALTH_PORT,
            "device": self.device,
            "roles": ",".join(self.roles),
            "threads": self._threads(file),
            "prefix-cache-bytes": prefix_bytes,
            "gpu-memory-utilization": file.flags.get("gpu-memory-utilization"),
            "tls-cert": f"{TLS}/tls.crt",
            "tls-key": f"{TLS}/tls.key",
            "tls-ca": f"{TLS}/ca.crt",
            "cluster-token-file": TOKEN if has_token(file) else None,
            "drain-timeout": f"{drain_s(file) + 10:g}",
        }
        return [f"--{flag}={value}" for flag, value in flags.items() if value is not None]

    def _threads(self, file: ServeFile) -> object:
        """Return its CPU threads, None for its own choice: that would be all cores of its node, not only the pod's."""
        cores = self.pod.cpu
        whole = isinstance(cores, str) and cores.isdigit() and self.vendor == "cpu"
        return file.flags.get("threads", cores if whole else None)


def pod_workers(file: ServeFile) -> tuple[PodWorker, ...]:
    """Return the workers in the file's order. Raises InvalidArgument naming the field, its value and what to write."""
    roles = _roles(file)
    workers = []
    for index, entry in enumerate(file.cluster.workers):
        pod = read_fields(WorkerPod, entry.kubernetes, f"workers[{index}].kubernetes")
        workers.append(
            PodWorker(index, entry, pod, _device(parse_place(entry.at, "at"), pod, f"workers[{index}]"), roles[index])
        )
    return tuple(workers)


def drain_s(file: ServeFile) -> float:
    """Return how long answers may take to finish. Raises InvalidArgument for what is no time."""
    value = file.flags.get("drain-timeout", DRAIN_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidArgument(f"drain-timeout is {value!r}; write seconds, 0 or more", field="drain-timeout")
    return float(value)


def has_token(file: ServeFile) -> bool:
    """Return whether the cluster has a token beside its certificates."""
    certificates = file.cluster.certificates
    return "cluster-token-file" in file.flags or (certificates is not None and certificates.token_file is not None)


def _device(at: WorkerPlace, pod: WorkerPod, name: str) -> str:
    """Return the devices as the pod numbers them, from 0. Raises InvalidArgument where the file doesn't tell them."""
    if pod.device is not None:
        field = f"{name}.kubernetes.device"
        place = parse_place(pod.device, field)
        device = place.devices
    else:
        field, device = f"{name}.at", at.devices
        if at.memory is not None:
            raise InvalidArgument(
                f"{field} {str(at)!r}: a pod has its devices to itself; leave out @{at.memory}", field=field
            )
        if device is not None and ":" in device:
            vendor = device.partition(":")[0]
            device = "+".join(f"{vendor}:{number}" for number in range(device.count("+") + 1))
    if device is None or "best" in device:
        raise InvalidArgument(
            f"{field} {pod.device or str(at)!r} doesn't tell on what the pod runs: write kubernetes: "
            "{device: cuda:0} (or cpu, hip:0, cuda:0+cuda:1) beside it",
            field=field,
        )
    numbers = [int(number) for number in re.findall(r":(\d+)", device)]
    if numbers != list(range(len(numbers))) or "cpu+" in device:
        raise InvalidArgument(
            f"{field} {device!r}: a pod has its devices to itself and numbers them from 0; write cpu, cuda:0 or "
            "cuda:0+cuda:1",
            field=field,
        )
    if pod.gpus is not None and pod.gpus != len(numbers):
        raise InvalidArgument(
            f"{name}.kubernetes.gpus is {pod.gpus}, the worker on {device} uses {len(numbers)}: write gpus: "
            f"{len(numbers)}, or name as many devices",
            field=f"{name}.kubernetes.gpus",
        )
    return device


def _roles(file: ServeFile) -> list[tuple[Role, ...]]:
    """Return what each worker must offer.

    A draft without a place sits beside the last stage, the model that reads long prompts beside the first.
    """
    roles = [[Role(role) for role in entry.roles] for entry in file.cluster.workers]
    stages = [index for index, own in enumerate(roles) if Role.TARGET in own]
    for role, flag, default in ((Role.DRAFT, "draft", stages[-1]), (Role.COMPRESS, "prefill-drafter", stages[0])):
        if flag in file.flags and not any(role in own for own in roles):
            roles[default].append(role)
    return [tuple(own) for own in roles]
