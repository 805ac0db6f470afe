"""Every kustomization renders; its objects are such as Kubernetes and the operators take; the names in them fit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel

from coordinator.cli.commands.serve import serve
from coordinator.manifests.overlay import overlay
from coordinator.manifests.reading import read_serve_file
from tests.deploy.dockerfile import FILE as DOCKERFILE
from tests.deploy.rendered import KUBERNETES, LEADER_WORKER_SET, OVERLAYS, Object, of_kind, pods, render

ALL = [*(KUBERNETES / "overlays" / name for name in OVERLAYS), LEADER_WORKER_SET]
VERSIONS = ("1.30", "1.33")
ROOT = KUBERNETES.parents[1]
RESOURCES = {"cuda": "nvidia.com/gpu", "hip": "amd.com/gpu"}

everywhere = pytest.mark.parametrize("directory", ALL, ids=lambda path: path.name)
overlays = pytest.mark.parametrize("name", OVERLAYS)


def flags(arguments: list[str]) -> dict[str, str]:
    """--NAME=VALUE by name."""
    return dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)


@everywhere
def test_objects_are_valid(directory: Path) -> None:
    """By Kubernetes' own schemas, strictly, and by those that cert-manager and the Prometheus operator publish."""
    # Seconds of imports, which every process that collects the tests would spend.
    from cloudcoil.models.cert_manager import v1 as cert_manager
    from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

    published: dict[str, Any] = {"cert-manager.io/v1": cert_manager, "monitoring.coreos.com/v1": prometheus_operator}
    objects = render(directory)
    for item in objects:
        if item["apiVersion"] in published:
            model: type[BaseModel] = getattr(published[item["apiVersion"]], item["kind"])
            # A field that the schema lacks is dropped on the way.
            assert model.model_validate(item).model_dump(mode="json", by_alias=True, exclude_unset=True) == item
        elif item["kind"] == "LeaderWorkerSet":
            check_leader_worker_set(item)
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(item, version, strict=True)
    assert len(objects) > 10


def check_leader_worker_set(item: Object) -> None:
    """Its own few fields by name and value, and the templates as Kubernetes' own."""
    assert item["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(item["spec"]) <= {
        "replicas",
        "startupPolicy",
        "leaderWorkerTemplate",
        "networkConfig",
        "rolloutStrategy",
    }
    assert item["spec"]["startupPolicy"] in ("LeaderCreated", "LeaderReady")
    group = item["spec"]["leaderWorkerTemplate"]
    assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert group["restartPolicy"] in ("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart")
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template}
        for version in VERSIONS:
            kubernetes_validate.validate(pod, version, strict=True)


@overlays
def test_overlays_are_what_their_cluster_files_say(name: str) -> None:
    """`flashsplit manifests` would write the files that are there, and no others."""
    directory = KUBERNETES / "overlays" / name
    files = overlay(
        read_serve_file(directory / "cluster.yaml", serve.params), directory, KUBERNETES / "base", directory
    )

    there = {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.yaml")}
    assert there.pop("cluster.yaml")
    assert there == {str(path): text for path, text in files.items()}


@overlays
def test_addresses_lead_to_services_and_pods(name: str) -> None:
    """Each address that the coordinator dials is a Service, its port a container's, its certificate the one for it."""
    objects = render(KUBERNETES / "overlays" / name)
    services, templates = of_kind(objects, "Service"), pods(objects)
    [config] = of_kind(objects, "ConfigMap").values()
    serve = yaml.safe_load(config["data"]["serve.yaml"])
    dialled = {address for flag in ("target-devices", "draft-device", "prefill-device")
               for address in str(serve.get(flag, "")).split(",") if address}  # fmt: skip
    certificates = of_kind(objects, "Certificate")

    assert {address.partition(":")[0] for address in dialled} == set(templates) - {"coordinator"}
    for address in dialled:
        host, _, port = address.partition(":")
        [served] = services[host]["spec"]["ports"]
        [container] = templates[host]["spec"]["containers"]
        ports = {item["name"]: item["containerPort"] for item in container["ports"]}
        assert int(port) == served["port"] == ports[served["targetPort"]]
        assert flags(container["args"])["listen"].endswith(f":{port}")
        assert host in certificates[host]["spec"]["dnsNames"]
        assert {"client auth", "server auth"} <= set(certificates[host]["spec"]["usages"])
        [selector] = [item["spec"]["selector"] for item in services.values() if item["metadata"]["name"] == host]
        chosen = [pod for pod in templates.values() if selector.items() <= pod["metadata"]["labels"].items()]
        assert chosen == [templates[host]]
        assert of_kind(objects, "StatefulSet")[host]["spec"]["serviceName"] == host


@everywhere
def test_pods_mount_what_is_made_and_ask_for_their_devices(directory: Path) -> None:
    """Secrets come from Certificates or are the two that people make, paths in arguments lie in mounts."""
    objects = render(directory)
    made = {item["spec"]["secretName"] for item in of_kind(objects, "Certificate").values()}
    for pod in pods(objects).values():
        spec = pod["spec"]
        [container] = spec["containers"]
        secrets = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        assert secrets <= made | {"api-keys", "cluster-token"}
        mounts = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert all(value.startswith(mounts) for value in flags(container["args"]).values() if value.startswith("/"))
        assert {"weights", "tmp"} <= {mount["name"] for mount in container["volumeMounts"]}
        assert next(mount for mount in container["volumeMounts"] if mount["name"] == "weights")["readOnly"]
        if container["name"] == "worker":
            device = flags(container["args"])["device"]
            limits = container.get("resources", {}).get("limits", {})
            wanted = RESOURCES.get(device.partition(":")[0])
            assert {key: int(value) for key, value in limits.items() if key.endswith(".com/gpu")} == (
                {} if wanted is None else {wanted: device.count("+") + 1}
            )
            assert "/dev/shm/" in mounts


@everywhere
def test_pods_have_time_to_drain_and_no_privileges(directory: Path) -> None:
    """The grace period is above the drain of the program; nobody is root, writes to its image or has a token."""
    objects = render(directory)
    [config] = [item["data"]["serve.yaml"] for item in of_kind(objects, "ConfigMap").values()]
    drain = float(yaml.safe_load(config).get("drain-timeout", 60))
    for pod in pods(objects).values():
        spec = pod["spec"]
        [container] = spec["containers"]
        if container["name"] == "worker":
            assert float(flags(container["args"])["drain-timeout"]) > drain
            assert spec["terminationGracePeriodSeconds"] > float(flags(container["args"])["drain-timeout"])
        else:
            pause = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
            assert spec["terminationGracePeriodSeconds"] > pause + drain
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["automountServiceAccountToken"] is False
        # A Service named flashsplit would set FLASHSPLIT_PORT, which is a flag.
        assert spec["enableServiceLinks"] is False


@everywhere
def test_policies_let_in_whom_they_should(directory: Path) -> None:
    """Workers: the coordinator and workers, on the port for steps. Clients: the coordinator's APIs."""
    objects = render(directory)
    policies, templates = of_kind(objects, "NetworkPolicy"), pods(objects)
    for name, policy in policies.items():
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert any(selector.items() <= pod["metadata"]["labels"].items() for pod in templates.values()), name
    by_component = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in templates.values()}
    [worker], [coordinator] = (by_component[kind]["spec"]["containers"] for kind in ("worker", "coordinator"))
    [rule] = policies["workers"]["spec"]["ingress"]
    [source] = rule["from"]
    [who] = source["podSelector"]["matchExpressions"]
    assert who["values"] == ["coordinator", "worker"]
    [shard] = [port["containerPort"] for port in worker["ports"] if port["name"] == "shard"]
    assert rule["ports"] == [{"port": shard}]
    assert {"port": shard} in policies["workers"]["spec"]["egress"][0]["ports"]
    [apis] = policies["coordinator"]["spec"]["ingress"]
    assert {api["port"] for api in apis["ports"]} == {port["containerPort"] for port in coordinator["ports"]}


@everywhere
def test_images_are_those_that_the_dockerfile_builds(directory: Path) -> None:
    """By the names and tags that its first lines give them."""
    built = set(re.findall(r"--target \S+ +(?:\S+ )*?-t (\S+)", DOCKERFILE.read_text()))
    objects = render(directory)
    templates = [*pods(objects).values(), *(job["spec"]["template"] for job in of_kind(objects, "Job").values())]
    used = {container["image"] for template in templates for container in template["spec"]["containers"]}
    assert used <= built, used - built


def test_the_demo_weights_are_copied(tmp_path: Path) -> None:
    """By the Job's own script, with its paths here; a second run finds them there."""
    [job] = of_kind(render(KUBERNETES / "overlays" / "demo-cpu"), "Job").values()
    [container] = job["spec"]["template"]["spec"]["containers"]
    [shell, options, script] = container["command"]
    script = script.replace("/models/", f"{tmp_path}/").replace("/demo/", f"{ROOT}/deploy/demo/")
    for _ in range(2):
        subprocess.run([shell, options, script], check=True)

    for pair in ("target", "draft"):
        files = {path.name: path.read_bytes() for path in (tmp_path / pair).iterdir()}
        assert files == {path.name: path.read_bytes() for path in (ROOT / "deploy" / "demo" / pair).iterdir()}
