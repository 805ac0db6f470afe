"""The coordinator's flags inside a pod: those of the file, with the cluster's addresses and the pod's own paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from coordinator.manifests.pods import ClusterPods
from coordinator.manifests.reading import ClusterFile
from coordinator.manifests.workers import TLS, TOKEN, PodWorker, has_token, having
from coordinator.placement import AUTO, parse_ranges, parse_weights
from services.description import Role
from services.errors import InvalidArgument

HTTP_PORT, GRPC_PORT = 8000, 50051
"""Inside the pod. The Service listens on those of the file."""

_PLACES = ("target-devices", "target-layers", "draft-device", "prefill-device")
_OF_WORKERS = ("threads", "prefix-cache-bytes", "worker-command")
_UNRENDERED = {
    "api-key": "a key would stand in a ConfigMap: write api-key-file and put the keys into the Secret api-keys",
    "ssl-ca-certs": "probes have no certificate to show: leave it out, and check clients' in the gateway before",
    "insecure": "the pods listen for the whole cluster: leave it out; the Service speaks TLS, and ca.crt of the Secret "
    "server-tls is for who calls it",
}


def serve_flags(file: ClusterFile, pods: ClusterPods, workers: tuple[PodWorker, ...]) -> dict[str, Any]:
    """For `serve --config`. Raises InvalidArgument naming the field, its value and what to write."""
    flags = dict(file.flags)
    for name, why in _UNRENDERED.items():
        if flags.pop(name, None) not in (None, False, [], ""):
            raise InvalidArgument(f"{name} cannot be rendered: {why}", field=name)
    for name in _PLACES:
        if name in flags:
            raise InvalidArgument(f"{name} {flags[name]!r} says what workers says too: leave it out", field=name)
    for name in ("model", "draft", "prefill-drafter"):
        if name in flags or name == "model":
            _check_below(name, flags.get(name), pods.model_mount)
    if "kv-cache-dir" in flags:
        _check_prefixes(flags["kv-cache-dir"], pods.model_mount)
    for name in (*_OF_WORKERS, "port", "grpc-port", "cluster-token-file"):
        flags.pop(name, None)
    flags |= placement(file, workers)
    flags |= {
        "host": "0.0.0.0",
        "port": HTTP_PORT,
        **({"grpc-port": GRPC_PORT} if flags.get("grpc", True) else {}),
        "api-key-file": "/etc/flashsplit/keys/api-keys",
        # Their images may have to be fetched first.
        "wait-for-workers": flags.get("wait-for-workers", 1200),
        "ssl-certfile": "/etc/flashsplit/server-tls/tls.crt",
        "ssl-keyfile": "/etc/flashsplit/server-tls/tls.key",
        "tls-cert": f"{TLS}/tls.crt",
        "tls-key": f"{TLS}/tls.key",
        "tls-ca": f"{TLS}/ca.crt",
    }
    flags.pop("tls-server-name", None)
    return flags | ({"cluster-token-file": TOKEN} if has_token(file) else {})


def service_ports(flags: Mapping[str, Any]) -> dict[str, int]:
    """Where clients find the doors, by their names. Raises InvalidArgument."""
    wanted = {"http": ("port", HTTP_PORT)}
    if flags.get("grpc", True):
        wanted["grpc"] = ("grpc-port", GRPC_PORT)
    ports = {name: flags.get(flag, default) for name, (flag, default) in wanted.items()}
    for name, port in ports.items():
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            flag = wanted[name][0]
            raise InvalidArgument(f"{flag} is {port!r}; a Service needs a number from 1 to 65535", field=flag)
    if len(set(ports.values())) < len(ports):
        raise InvalidArgument(f"port and grpc-port are both {ports['http']}: give two numbers", field="grpc-port")
    return ports


def placement(file: ClusterFile, workers: tuple[PodWorker, ...]) -> dict[str, str]:
    """Who holds what, by address. Raises InvalidArgument."""
    stages = list(having(workers, Role.TARGET))
    placed = {"target-devices": ",".join(stage.address for stage in stages), **_layers(file, workers, stages)}
    for role, flag, default in ((Role.DRAFT, "draft-device", stages[-1]), (Role.COMPRESS, "prefill-device", stages[0])):
        for worker in having(workers, role):
            if worker is not default:
                placed[flag] = worker.address
    return placed


def _layers(file: ClusterFile, workers: Sequence[PodWorker], stages: Sequence[PodWorker]) -> dict[str, str]:
    """The flag that says who holds which layers; none for equal shares, or when the file has auto for all."""
    split = file.flags.get("target-layer-split")
    given: dict[str, list[int]] = {"layers": [], "share": []}
    for worker in workers:
        for field, indices in given.items():
            if getattr(worker.entry, field) is None:
                continue
            indices.append(worker.index)
            if worker not in stages:
                raise InvalidArgument(
                    f"workers[{worker.index}].{field} has no effect without the role target: leave one out",
                    field=f"workers[{worker.index}].{field}",
                )
    for field, indices in given.items():
        lacking = [stage.index for stage in stages if stage.index not in indices]
        if indices and lacking:
            raise InvalidArgument(
                f"workers[{lacking[0]}].{field} is missing, workers[{indices[0]}] has it: give it to all stages or to "
                "none",
                field=f"workers[{lacking[0]}].{field}",
            )
        if indices and split is not None:
            raise InvalidArgument(
                f"target-layer-split {split!r} says what {field} of the workers says too: leave it out",
                field="target-layer-split",
            )
    if split not in (None, AUTO):
        raise InvalidArgument(
            f"target-layer-split {split!r}: write share: NUMBER in each worker instead, or auto here",
            field="target-layer-split",
        )
    if given["share"]:
        text = ",".join(f"{stage.entry.share:g}" for stage in stages)
        parse_weights(text, len(stages))
        return {"target-layer-split": text}
    ranges = [stage.entry.layers for stage in stages if stage.entry.layers is not None]
    if not ranges:
        return {}
    text = ",".join(f"{layers.first}:{layers.last}" for layers in ranges)
    parse_ranges(text, len(stages), ranges[-1].last)
    return {"target-layers": text}


def _check_below(name: str, value: object, mount: str) -> None:
    if not isinstance(value, str) or PurePosixPath(mount) not in PurePosixPath(value).parents or ".." in value:
        raise InvalidArgument(
            f"{name} is {value!r}; the weights' claim is mounted at {mount}: write a directory below it, or name "
            "another kubernetes: model-mount",
            field=name,
        )


def _check_prefixes(value: object, weights: str) -> None:
    name = "kv-cache-dir"
    if not isinstance(value, str) or not value.startswith("/") or value.rstrip("/") == "" or ".." in value:
        raise InvalidArgument(f"{name} is {value!r}; in a pod it must be an absolute path, like /prefixes", field=name)
    for taken in (weights, "/etc/flashsplit", "/tmp"):
        if PurePosixPath(value).is_relative_to(taken):
            raise InvalidArgument(
                f"{name} is {value!r}; {taken} is another mount: write one like /prefixes", field=name
            )
