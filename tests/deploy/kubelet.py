"""What a cluster does with rendered objects, as far as their programs notice: Secrets from Certificates, mounts,
variables, probes. Pods are programs in a sandbox.
"""

from __future__ import annotations

import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.cli.certificate_authority import Authority, KeyPair, make_authority
from tests.deploy.rendered import Object, of_kind
from tests.deploy.sandbox import Program, Sandbox

KEY = "a-key-of-the-test"


@dataclass
class Pod:
    """A pod's one container, running."""

    program: Program
    container: Object
    grace_s: int

    def probe(self, kind: str) -> bool:
        """One try of `startupProbe`, `readinessProbe` or `livenessProbe`, as a node makes it."""
        probe = self.container[kind]
        timeout = probe.get("timeoutSeconds", 1)
        if "grpc" in probe:
            return answers_grpc(f"{self.program.address}:{probe['grpc']['port']}", timeout)
        get = probe["httpGet"]
        port = get["port"]
        [number] = [
            item["containerPort"] for item in self.container["ports"] if port in (item["name"], item["containerPort"])
        ]
        return answers_http(f"{get['scheme'].lower()}://{self.program.address}:{number}{get['path']}", timeout)


class Cluster:
    """One namespace. weights: what the claim for weights holds."""

    def __init__(self, sandbox: Sandbox, objects: tuple[Object, ...], weights: Path) -> None:
        self._sandbox, self._objects, self._weights = sandbox, objects, weights
        self._secrets = sandbox.folder / "secrets"
        self._configs = of_kind(objects, "ConfigMap")

    def secret(self, name: str) -> Path:
        """A Secret's directory."""
        return self._secrets / name

    def make_secrets(self) -> None:
        """As cert-manager makes them, and as the README says to make the others."""
        authorities: dict[str, Authority] = {}
        issuers = of_kind(self._objects, "Issuer")
        certificates = of_kind(self._objects, "Certificate")
        for certificate in sorted(certificates.values(), key=lambda item: not item["spec"].get("isCA", False)):
            spec = certificate["spec"]
            issuer = issuers[spec["issuerRef"]["name"]]["spec"]
            if spec.get("isCA"):
                assert "selfSigned" in issuer
                authorities[spec["secretName"]] = pair = made = make_authority(30)
            else:
                # One signed by itself is its own authority; one of a throw-away authority does as well.
                made = authorities[issuer["ca"]["secretName"]] if "ca" in issuer else make_authority(30)
                known = [self._sandbox.hosts[name] for name in spec["dnsNames"] if name in self._sandbox.hosts]
                pair = made.issue([*spec["dnsNames"], *known], 30)
            self._write(spec["secretName"], pair, made)
        for name, content in {
            "api-keys": {"api-keys": f"{KEY}\n", "metrics": KEY},
            "cluster-token": {"token": "0123456789abcdef0123456789abcdef\n"},
        }.items():
            self.secret(name).mkdir(parents=True)
            for entry, text in content.items():
                (self.secret(name) / entry).write_text(text)

    def start(self, name: str, template: Object, program: str) -> Pod:
        """A pod of a template; its name is its host's."""
        [container] = template["spec"]["containers"]
        address = self._sandbox.host(name)
        paths = self._mounts(name, template["spec"], container)
        environment: dict[str, str] = {}
        for entry in container.get("env", []):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert field in (None, "metadata.name")
            environment[entry["name"]] = name if field else expand(entry["value"], environment)
        for directory in paths.values():
            for file in directory.glob("*.yaml"):
                file.write_text(self._sandbox.rewrite(file.read_text(), address, paths))
        arguments = [expand(word, environment) for word in container["args"]]
        started = self._sandbox.start(name, [program, *arguments], paths=paths, environment=environment)
        return Pod(started, container, template["spec"]["terminationGracePeriodSeconds"])

    def _mounts(self, pod: str, spec: Object, container: Object) -> dict[str, Path]:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        paths = {}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "secret" in volume:
                paths[mount["mountPath"]] = self.secret(volume["secret"]["secretName"])
                assert paths[mount["mountPath"]].is_dir(), f"{pod}: nobody makes the Secret for {mount['mountPath']}"
            elif "configMap" in volume:
                directory = self._sandbox.folder / f"{pod}-{mount['name']}"
                directory.mkdir()
                for file, text in self._configs[volume["configMap"]["name"]]["data"].items():
                    (directory / file).write_text(text)
                paths[mount["mountPath"]] = directory
            elif "persistentVolumeClaim" in volume:
                kept = self._sandbox.folder / "prefixes"
                paths[mount["mountPath"]] = self._weights if mount["name"] == "weights" else kept
            else:
                assert "emptyDir" in volume
        return paths

    def _write(self, name: str, pair: KeyPair, authority: Authority) -> None:
        """Keys in the form that cert-manager writes unless told otherwise."""
        directory = self.secret(name)
        directory.mkdir(parents=True)
        (directory / "tls.crt").write_bytes(pair.certificate.public_bytes(Encoding.PEM))
        (directory / "tls.key").write_bytes(
            pair.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        )
        (directory / "ca.crt").write_bytes(authority.certificate.public_bytes(Encoding.PEM))


def expand(text: str, environment: Mapping[str, str]) -> str:
    """$(NAME) as the variable's value."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def answers_grpc(address: str, timeout: float) -> bool:
    """Whether grpc.health.v1 says SERVING, without TLS."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def answers_http(url: str, timeout: float) -> bool:
    """Whether a GET gets 200 to 399; certificates are not looked at."""
    context: Any = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=context if url.startswith("https") else None):
            return True
    except (OSError, urllib.error.URLError):
        return False
