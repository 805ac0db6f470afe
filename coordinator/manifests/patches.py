"""What an overlay changes in the base's objects: patches as Kustomize merges them, and the claims that it adds."""

from __future__ import annotations

from typing import Any

from coordinator.manifests.pods import ClusterPods, Images
from coordinator.manifests.reading import ServeFile
from coordinator.manifests.serving import service_ports
from coordinator.manifests.workers import RESOURCES, PodWorker, drain_s, has_token

Yaml = dict[str, Any]

PRE_STOP_S, CLOSING_S = 5, 20
"""Seconds that a pod needs before its drain, until proxies know that it ends, and after it, for the last bytes."""


def worker_patches(file: ServeFile, pods: ClusterPods, worker: PodWorker) -> list[Yaml]:
    """Return the patches of the base's `worker`, before its name gets the suffix."""
    token = has_token(file)
    container = {
        "name": "worker",
        "image": worker.pod.image or _image(pods.images, worker.vendor),
        "args": worker.arguments(file),
        "resources": _resources(worker),
        **_mounts(pods, token),
    }
    spec: Yaml = {
        "terminationGracePeriodSeconds": _grace_s(file),
        "nodeSelector": worker.pod.node_selector or None,
        "tolerations": worker.pod.tolerations or None,
        "runtimeClassName": worker.pod.runtime_class,
        "securityContext": {"supplementalGroups": worker.pod.groups} if worker.pod.groups else None,
        "affinity": _APART if worker.vendor == "cpu" else None,
        "containers": [{name: value for name, value in container.items() if value}],
        "volumes": _volumes(pods, f"{worker.name}-tls", token),
    }
    spec = {name: value for name, value in spec.items() if value is not None}
    return [
        _object("apps/v1", "StatefulSet", "worker", {"spec": {"template": _template(spec)}}),
        _object(
            "cert-manager.io/v1",
            "Certificate",
            "worker",
            {"spec": {"secretName": f"{worker.name}-tls", "dnsNames": [worker.name]}},
        ),
    ]


def coordinator_patches(file: ServeFile, pods: ClusterPods) -> list[Yaml]:
    """Return the patches of the base's coordinator, of its Service and of its certificate."""
    token, prefixes = has_token(file), file.flags.get("kv-cache-dir")
    mounts = _mounts(pods, token)
    volumes = _volumes(pods, "coordinator-tls", token)
    if prefixes is not None:
        mounts["volumeMounts"].append({"name": "prefixes", "mountPath": prefixes})
        volumes.append({"name": "prefixes", "persistentVolumeClaim": {"claimName": pods.prefix_claim}})
    spec = {
        "terminationGracePeriodSeconds": PRE_STOP_S + _grace_s(file),
        "containers": [{"name": "coordinator", "image": pods.images.coordinator, **mounts}],
        "volumes": volumes,
    }
    names = ["coordinator", f"coordinator.{pods.namespace}.svc"]
    ports = [
        {"name": name, "port": port, "targetPort": name, **({"appProtocol": "https"} if name == "http" else {})}
        for name, port in service_ports(file.flags).items()
    ]
    return [
        _object("apps/v1", "Deployment", "coordinator", {"spec": {"template": _template(spec)}}),
        # Kustomize merges ports by number: these are all there are.
        _object("v1", "Service", "coordinator", {"spec": {"ports": [{"$patch": "replace"}, *ports]}}),
        _object("cert-manager.io/v1", "Certificate", "server", {"spec": {"dnsNames": names}}),
    ]


def claims(file: ServeFile, pods: ClusterPods) -> list[Yaml]:
    """Return the claims that the file gives a size; others must be in the cluster already."""
    volumes = [(pods.weights_claim, pods.weights_size, pods.weights_access)]
    if "kv-cache-dir" in file.flags:
        volumes.append((pods.prefix_claim, pods.prefix_size, "ReadWriteOnce"))
    return [
        _object(
            "v1",
            "PersistentVolumeClaim",
            name,
            {"spec": {"accessModes": [access], "resources": {"requests": {"storage": str(size)}}}},
        )
        for name, size, access in volumes
        if size is not None
    ]


_APART = {
    # CPU stages side by side on one node would share its memory's bandwidth, which is what decoding is made of.
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 50,
                "podAffinityTerm": {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {
                        "matchExpressions": [
                            {"key": "app.kubernetes.io/component", "operator": "In", "values": ["worker"]}
                        ]
                    },
                },
            }
        ]
    }
}


def _image(images: Images, vendor: str) -> str:
    """Return the image of workers on a vendor's devices."""
    return {"cpu": images.cpu, "cuda": images.cuda, "hip": images.hip}[vendor]


def _resources(worker: PodWorker) -> Yaml:
    """Return what the worker's container asks for and may use at most."""
    pod = worker.pod
    requests = {"cpu": pod.cpu, "memory": pod.memory}
    limits = {"memory": pod.memory, RESOURCES.get(worker.vendor, ""): str(worker.gpus) if worker.gpus else None}
    resources = {"requests": requests, "limits": limits}
    return {
        kind: {name: str(value) for name, value in amounts.items() if value is not None}
        for kind, amounts in resources.items()
        if any(value is not None for value in amounts.values())
    }


def _mounts(pods: ClusterPods, token: bool) -> dict[str, list[Yaml]]:
    """Return what coordinator and workers have mounted otherwise than in the base."""
    mounts: list[Yaml] = []
    if pods.model_mount != "/models":
        # Merged by its path, so the base's goes.
        mounts += [
            {"mountPath": "/models", "$patch": "delete"},
            {"name": "weights", "mountPath": pods.model_mount, "readOnly": True},
        ]
    if token:
        mounts.append({"name": "token", "mountPath": "/etc/flashsplit/token", "readOnly": True})
    return {"env": [{"name": "HF_HOME", "value": pods.model_mount}], "volumeMounts": mounts}


def _volumes(pods: ClusterPods, tls: str, token: bool) -> list[Yaml]:
    """Return the volumes of a pod. tls: the Secret with its certificate; token: whether the cluster has one."""
    volumes: list[Yaml] = [
        {"name": "tls", "secret": {"secretName": tls}},
        {"name": "weights", "persistentVolumeClaim": {"claimName": pods.weights_claim, "readOnly": True}},
    ]
    if token:
        volumes.append({"name": "token", "secret": {"secretName": "cluster-token", "defaultMode": 0o440}})
    return volumes


def _grace_s(file: ServeFile) -> int:
    """Return the seconds that a pod may take to end."""
    return round(drain_s(file)) + CLOSING_S


def _template(spec: Yaml) -> Yaml:
    """Return a pod template."""
    return {"spec": spec}


def _object(version: str, kind: str, name: str, rest: Yaml) -> Yaml:
    """Return an object of Kubernetes."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}
