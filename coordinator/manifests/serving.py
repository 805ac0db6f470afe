"""The coordinator's flags inside a pod: those of the file, with the cluster's addresses and the pod's own paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from coordinator.cluster.placement import parse_ranges
from coordinator.config.cluster_file import cluster_flags
from coordinator.manifests.pods import ClusterPods
from coordinator.manifests.reading import ServeFile
from coordinator.manifests.workers import TLS, TOKEN, PodWorker, has_token
from services.errors import InvalidArgument

HTTP_PORT, GRPC_PORT = 8000, 50051
"""Inside the pod. The Service listens on those of the file."""

_WORKER_FLAGS = ("threads", "prefix-cache-bytes", "gpu-memory-utilization", "worker-command")
_UNRENDERED = {
    "api-key": "a key would stand in a ConfigMap: write api-key-file and put the keys into the Secret api-keys",
    "ssl-ca-certs": "probes have no certificate to show: leave it out, and check clients' in the gateway before",
    "ssl-crlfile": "pods ask clients for no certificate: leave it out, and check clients' in the gateway before",
    "insecure": "the pods listen for the whole cluster: leave it out; the Service speaks TLS, and ca.crt of the Secret "
    "server-tls is for who calls it",
}


def serve_flags(file: ServeFile, pods: ClusterPods, workers: tuple[PodWorker, ...]) -> dict[str, Any]:
    """Return the flags for `serve --config` inside the pod.

    Raises InvalidArgument naming the field, its value and what to write.
    """
    flags = dict(file.flags)
    for name, why in _UNRENDERED.items():
        if flags.pop(name, None) not in (None, False, [], ""):
            raise InvalidArgument(f"{name} cannot be rendered: {why}", field=name)
    for name in ("model", "draft", "prefill-drafter"):
        if name in flags or name == "model":
            _check_below(name, flags.get(name), pods.model_mount)
    if "kv-cache-dir" in flags:
        _check_prefixes(flags["kv-cache-dir"], pods.model_mount)
    for name in (*_WORKER_FLAGS, "port", "grpc-port", "cluster-token-file"):
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
    # Of the authority of bare hosts.
    for name in ("tls-server-name", "tls-crl"):
        flags.pop(name, None)
    return flags | ({"cluster-token-file": TOKEN} if has_token(file) else {})


def service_ports(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return the ports by which clients reach the server, by protocol.

    Raises InvalidArgument for what is no port, and for one port twice.
    """
    known = {"http": ("port", HTTP_PORT)}
    if flags.get("grpc", True):
        known["grpc"] = ("grpc-port", GRPC_PORT)
    ports = {name: flags.get(flag, default) for name, (flag, default) in known.items()}
    for name, port in ports.items():
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            flag = known[name][0]
            raise InvalidArgument(f"{flag} is {port!r}; a Service needs a number from 1 to 65535", field=flag)
    if len(set(ports.values())) < len(ports):
        raise InvalidArgument(f"port and grpc-port are both {ports['http']}: give two numbers", field="grpc-port")
    return ports


def placement(file: ServeFile, workers: tuple[PodWorker, ...]) -> dict[str, Any]:
    """Return the flags that place the model on the pods, as `serve` would place it on the same workers.

    Raises InvalidArgument for workers that cannot be placed together.
    """
    entries = [
        worker.entry.model_copy(
            update={"at": worker.address, "roles": [role.value for role in worker.roles], "command": None}
        )
        for worker in workers
    ]
    flags = cluster_flags(file.cluster.model_copy(update={"workers": entries, "certificates": None}))
    by_flag = {name.replace("_", "-"): value for name, value in flags.items()}
    if "target-layers" in by_flag:
        ranges = by_flag["target-layers"]
        parse_ranges(ranges, ranges.count(",") + 1, int(ranges.rpartition(":")[2]))
    return by_flag


def _check_below(name: str, value: object, mount: str) -> None:
    """Raise InvalidArgument for a checkpoint that does not lie in the weights' claim."""
    if not isinstance(value, str) or PurePosixPath(mount) not in PurePosixPath(value).parents or ".." in value:
        raise InvalidArgument(
            f"{name} is {value!r}; the weights' claim is mounted at {mount}: write a directory below it, or name "
            "another kubernetes: model-mount",
            field=name,
        )


def _check_prefixes(value: object, weights: str) -> None:
    """Raise InvalidArgument for a store of prefixes that cannot be mounted where it is said to be."""
    name = "kv-cache-dir"
    if not isinstance(value, str) or not value.startswith("/") or value.rstrip("/") == "" or ".." in value:
        raise InvalidArgument(f"{name} is {value!r}; in a pod it must be an absolute path, like /prefixes", field=name)
    for taken in (weights, "/etc/flashsplit", "/tmp"):
        if PurePosixPath(value).is_relative_to(taken):
            raise InvalidArgument(
                f"{name} is {value!r}; {taken} is another mount: write one like /prefixes", field=name
            )
