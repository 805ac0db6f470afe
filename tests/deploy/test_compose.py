"""The compose file's services, running: as its commands say, on addresses of this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.sandbox import PROGRAMS, Program, Sandbox, listening_ports
from tests.e2e.conftest import ROOT, until

FILE = ROOT / "deploy" / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
WORKERS = ("worker-0", "worker-1")
IMAGES = {"coordinator": "flashsplit", "cpu": "flashsplit-worker"}
"""What an image of each target starts; tests/deploy/test_images.py looks at that."""


@dataclass
class Composed:
    """The services that last."""

    coordinator: Program
    workers: list[Program]


def healthy(service: str, program: Program) -> bool:
    """One try of a service's health check, as in its container: its loopback is the program's own address."""
    kind, command, *arguments = SERVICES[service]["healthcheck"]["test"]
    assert (kind, command) == ("CMD", "python")
    words = [word.replace("127.0.0.1", program.address) for word in arguments]
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=10, check=False).returncode == 0


def volumes(service: str, made: Path) -> dict[str, Path]:
    """Where what a service mounts lies here."""
    found = {}
    for volume in SERVICES[service]["volumes"]:
        source, target = volume.split(":")[:2]
        found[target] = made if source == "certificates" else (FILE.parent / source).resolve()
    return found


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """In the order of depends_on: certificates, workers, and the coordinator once these are healthy."""
    folder = tmp_path_factory.mktemp("compose")
    sandbox = Sandbox(folder)
    for name in WORKERS:
        sandbox.host(name)
    certificates = folder / "certificates"
    certificates.mkdir()
    (folder / "bin").mkdir()
    for name, module in PROGRAMS.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    try:
        for _ in range(2):
            # A second `up` finds them there.
            run_once("certificates", sandbox, volumes("certificates", certificates), folder / "bin")
        assert (certificates / "made" / "coordinator-key.pem").is_file()
        workers = {name: start(sandbox, name, certificates) for name in WORKERS}
        for name, program in workers.items():
            until(lambda name=name, program=program: healthy(name, program), 60)
        assert set(SERVICES["coordinator"]["depends_on"]) == set(WORKERS)
        coordinator = start(sandbox, "coordinator", certificates)
        until(lambda: healthy("coordinator", coordinator), 60)
        yield Composed(coordinator, list(workers.values()))
    finally:
        sandbox.close()


def start(sandbox: Sandbox, service: str, certificates: Path) -> Program:
    """A service that lasts."""
    program = IMAGES[SERVICES[service]["build"]["target"]]
    return sandbox.start(service, [program, *SERVICES[service]["command"]], paths=volumes(service, certificates))


def run_once(service: str, sandbox: Sandbox, paths: dict[str, Path], programs: Path) -> None:
    """A service that ends; its shell finds the programs as in the image."""
    [shell, option] = SERVICES[service]["entrypoint"]
    words = [sandbox.rewrite(word, "0.0.0.0", paths) for word in SERVICES[service]["command"]]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run([shell, option, *words], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_demo_answers_on_the_published_ports(composed: Composed) -> None:
    """HTTP and gRPC where the file publishes them, workers on none that it does."""
    published = {int(port.split(":")[-1]) for port in SERVICES["coordinator"]["ports"]}
    assert listening_ports(composed.coordinator.address) == published
    assert all("ports" not in SERVICES[name] for name in WORKERS)
    for program in composed.workers:
        assert listening_ports(program.address) == {7001, 7002}
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["coordinator"]["ports"])

    body = {"messages": [{"role": "user", "content": "Calculate 4729 + 3485."}], "max_tokens": 200}
    request = urllib.request.Request(
        f"http://{composed.coordinator.address}:8000/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "8214" in json.load(answer)["choices"][0]["message"]["content"]


def test_containers_have_time_to_drain_and_no_privileges() -> None:
    """Grace periods are above the programs' own; workers are in a network without a way out."""
    composed = yaml.safe_load(FILE.read_text())
    assert composed["networks"]["workers"] == {"internal": True}
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"]
        assert service["user"] != "root"
    for name in WORKERS:
        [drain] = [word.split("=")[1] for word in SERVICES[name]["command"] if word.startswith("--drain-timeout=")]
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > int(drain) > 60
        assert SERVICES[name]["networks"] == ["workers"]
    assert int(SERVICES["coordinator"]["stop_grace_period"].removesuffix("s")) > 60
