"""The demo overlay's pods, running: their ports, probes, certificates and addresses fit each other and the programs."""

from __future__ import annotations

import json
import signal
import ssl
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.cli.commands.manifests import manifests
from tests.deploy.kubelet import KEY, Cluster, Pod
from tests.deploy.rendered import KUBERNETES, LEADER_WORKER_SET, of_kind, pods, render
from tests.deploy.sandbox import Sandbox, listening_ports
from tests.e2e.conftest import ROOT, until

DEMO = KUBERNETES / "overlays" / "demo-cpu"
APP = "app.kubernetes.io"
QUESTION = "Calculate 4729 + 3485."


@dataclass
class Demo:
    """All pods, ready. url: the HTTP API as the Service's clients see it; context: trusts its certificate."""

    coordinator: Pod
    workers: list[Pod]
    url: str
    context: ssl.SSLContext

    def request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        """With the test's key."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        return urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)

    def ask(self, text: str, max_tokens: int = 200) -> str:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
        request = self.request("/v1/chat/completions", body)
        with urllib.request.urlopen(request, timeout=60, context=self.context) as answer:
            found: dict[str, Any] = json.load(answer)
        return str(found["choices"][0]["message"]["content"])


def start(folder: Path, directory: Path, weights: Path = ROOT / "deploy" / "demo") -> tuple[Sandbox, Demo]:
    """The pods of a kustomization, the coordinator first: nobody says in which order they come."""
    objects = render(directory)
    templates = pods(objects)
    sandbox = Sandbox(folder)
    sandbox.stand_ins["cuda:0"] = "cpu"
    for name in templates:
        address = sandbox.host(name)
        # How a group's leader calls its workers.
        sandbox.hosts |= {f"{name}.{group}": address for group in of_kind(objects, "LeaderWorkerSet")}
    for name, service in of_kind(objects, "Service").items():
        chosen = [pod for pod in templates if service["spec"]["selector"].items() <= labels(templates[pod]).items()]
        sandbox.hosts[name] = sandbox.hosts[chosen[0]]
    cluster = Cluster(sandbox, objects, weights)
    cluster.make_secrets()
    try:
        found = {
            name: cluster.start(
                name,
                template,
                {"coordinator": "flashsplit", "worker": "flashsplit-worker"}[labels(template)[f"{APP}/component"]],
            )
            for name, template in templates.items()
        }
        started(list(found.values()))
    except BaseException:
        sandbox.close()
        raise
    [coordinator] = [pod for pod in found.values() if pod.container["name"] == "coordinator"]
    ports = {port["name"]: port["targetPort"] for port in of_kind(objects, "Service")["coordinator"]["spec"]["ports"]}
    [port] = [item["containerPort"] for item in coordinator.container["ports"] if item["name"] == ports["http"]]
    context = ssl.create_default_context(cafile=str(cluster.secret("server-tls") / "ca.crt"))
    url = f"https://{coordinator.program.address}:{port}"
    return sandbox, Demo(coordinator, [pod for pod in found.values() if pod is not coordinator], url, context)


def labels(template: dict[str, Any]) -> dict[str, str]:
    """Of a pod."""
    found: dict[str, str] = template["metadata"]["labels"]
    return found


def started(found: list[Pod]) -> None:
    """Wait until all startup probes have succeeded; none of the programs ends meanwhile."""

    def holds() -> bool:
        for pod in found:
            assert pod.program.process.poll() is None, pod.program.log
        return all(pod.probe("startupProbe") for pod in found)

    until(holds, 90)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    sandbox, found = start(tmp_path_factory.mktemp("pods"), DEMO)
    yield found
    sandbox.close()


def test_every_probe_succeeds(demo: Demo) -> None:
    """Of the coordinator and the workers, without key, certificate or token."""
    for pod in (demo.coordinator, *demo.workers):
        assert all(pod.probe(kind) for kind in ("startupProbe", "readinessProbe", "livenessProbe")), pod.program.log


def test_clients_are_answered_through_the_service(demo: Demo) -> None:
    """With a key, behind the certificate of the Secret, over two workers behind theirs."""
    assert "8214" in demo.ask(QUESTION)


def test_containers_listen_on_their_ports_and_no_others(demo: Demo) -> None:
    """As the kernel tells."""
    for pod in (demo.coordinator, *demo.workers):
        assert listening_ports(pod.program.address) == {port["containerPort"] for port in pod.container["ports"]}


def test_answers_end_before_pods_do(demo: Demo) -> None:
    """All get SIGTERM in the middle of an answer, workers first: it comes whole, all exit in their time. Ends them."""
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
    everyone = [*demo.workers, demo.coordinator]
    with urllib.request.urlopen(demo.request("/v1/completions", body), timeout=60, context=demo.context) as answer:
        first = answer.readline()
        for pod in everyone:
            pod.program.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        rest = answer.read().decode()
    for pod in everyone:
        assert pod.program.process.wait(pod.grace_s - (time.monotonic() - began)) == 0, pod.program.log

    assert first.startswith(b"data: ")
    assert rest.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in rest.replace(" ", "")


@pytest.mark.slow
def test_no_requests_are_sent_while_a_stage_is_gone(tmp_path: Path) -> None:
    """The coordinator's readiness tells, within the time of a few probes."""
    sandbox, found = start(tmp_path, DEMO)
    try:
        found.workers[1].program.process.kill()
        until(lambda: not found.coordinator.probe("readinessProbe"), 15)
    finally:
        sandbox.close()


@pytest.mark.slow
def test_a_stage_that_is_gone_ends_nobody_else(tmp_path: Path) -> None:
    """A restart of the coordinator would help nobody: its liveness holds, and that of the other worker."""
    sandbox, found = start(tmp_path, DEMO)
    try:
        lost, left = found.workers
        lost.program.process.kill()
        lost.program.process.wait(5)
        until(lambda: not lost.probe("readinessProbe"), 5)
        time.sleep(2)
        assert found.coordinator.probe("livenessProbe")
        assert left.probe("livenessProbe")
        assert left.probe("readinessProbe")
        assert found.coordinator.program.process.poll() is None
    finally:
        sandbox.close()


CLUSTER = """
model: /srv/weights/target
draft: /srv/weights/draft
dtype: float32
port: 80
grpc-port: 443
drain-timeout: 5
kv-cache-dir: /var/prefixes
kv-cache-min-tokens: 8
threads: 1
workers:
- at: gpu-a:7001
  layers: '0:5'
  kubernetes: {device: cpu}
- at: cpu
  layers: '5:12'
- at: gpu-a:7002
  roles: [draft]
  kubernetes: {device: cuda:0, gpus: 1}
certificates: {cert: a.pem, key: a-key.pem, ca: ca.pem, token-file: token}
kubernetes: {model-mount: /srv/weights, prefix-size: 1Gi}
"""


@pytest.mark.slow
def test_a_cluster_file_of_ones_own_runs(tmp_path: Path) -> None:
    """Layers, a draft of its own, a token, prefixes on disk: written by the command, started as written."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "pods").mkdir()
    arguments = ["--config", str(tmp_path / "cluster.yaml"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(manifests, [*arguments, "--base", str(KUBERNETES / "base")])
    assert done.exit_code == 0, done.output
    sandbox, found = start(tmp_path / "pods", tmp_path / "out")
    try:
        assert "8214" in found.ask(QUESTION)
        log = found.coordinator.program.log
        assert [line for line in log.splitlines() if "layers [5, 12)" in line]
        assert (tmp_path / "pods" / "prefixes").is_dir()
    finally:
        sandbox.close()


@pytest.mark.slow
def test_a_group_of_a_leader_worker_set_runs(tmp_path: Path) -> None:
    """The first one; the leader finds its own workers, behind one certificate, by the name that it expects."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "pods").mkdir()
    for name, directory in (("Qwen3.6-27B", "target"), ("Qwen3.6-27B-DFlash", "draft")):
        (tmp_path / "weights" / name).symlink_to(ROOT / "deploy" / "demo" / directory)
    sandbox, found = start(tmp_path / "pods", LEADER_WORKER_SET, tmp_path / "weights")
    try:
        assert len(found.workers) == 2
        assert all(pod.probe("readinessProbe") for pod in (found.coordinator, *found.workers))
        assert found.ask("Hello", 5)
    finally:
        sandbox.close()
