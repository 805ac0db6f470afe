"""The units for bare hosts: systemd takes them, and their command lines run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from coordinator.cli.commands.certs import certs
from tests.deploy.kubelet import KEY, answers_grpc
from tests.deploy.sandbox import PROGRAMS, Program, Sandbox
from tests.e2e.conftest import ROOT, until

UNITS = ROOT / "deploy" / "systemd"
SERVER, WORKER = "flashsplit.service", "flashsplit-worker@.service"
MOST_EXPOSED = 30
"""Of systemd's scale to 100."""


def unit(name: str) -> dict[str, list[str]]:
    """All settings of all sections."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().replace("\\\n", "").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def command_line(name: str, variables: Mapping[str, str], credentials: Path) -> list[str]:
    """Of ExecStart, as systemd fills it in: a variable in braces stays one word."""
    [text] = unit(name)["ExecStart"]
    words = []
    for word in text.replace("%d", str(credentials)).split():
        bare = re.fullmatch(r"\$(\w+)", word)
        words += (
            shlex.split(variables[bare[1]]) if bare else [re.sub(r"\$\{(\w+)\}", lambda it: variables[it[1]], word)]
        )
    return [Path(words[0]).name, *words[1:]]


def credentials(name: str, folder: Path, etc: Mapping[str, Path]) -> Path:
    """A unit's directory of them. etc: where the files are that /etc/flashsplit has on a host."""
    folder.mkdir()
    for setting in unit(name)["LoadCredential"]:
        credential, _, source = setting.partition(":")
        shutil.copyfile(etc[source.removeprefix("/etc/flashsplit/")], folder / credential)
    return folder


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Program, list[Program], Path]]:
    """Two hosts with a worker each, the second one started late, and the server."""
    sandbox, variables = Sandbox(tmp_path), dict(
        line.split("=", 1) for line in (UNITS / "worker.env.example").read_text().splitlines() if line[:1] != "#"
    )  # fmt: skip
    addresses = [sandbox.host(name) for name in ("gpu-a", "gpu-b")]
    made = tmp_path / "certificates"
    hosts = [word for address in addresses for word in ("--host", address)]
    assert CliRunner().invoke(certs, ["--out", str(made), *hosts]).exit_code == 0
    (tmp_path / "keys").write_text(f"{KEY}\n")
    sandbox.stand_ins["cuda:0"] = "cpu"
    paths = {"/srv/models": ROOT / "deploy" / "demo", "/etc/flashsplit/cluster.yaml": tmp_path / "cluster.yaml"}
    _, port = variables["LISTEN"].split(":")
    file = {"model": str(ROOT / "deploy/demo/target"), "draft": str(ROOT / "deploy/demo/draft"), "dtype": "float32",
            "host": "0.0.0.0", "target-devices": ",".join(f"gpu-{name}:{port}" for name in "ab")}  # fmt: skip
    text = sandbox.rewrite(yaml.safe_dump(file), sandbox.address("server"), {})
    (tmp_path / "cluster.yaml").write_text(text)
    etc = {"api-keys": tmp_path / "keys", "ca.pem": made / "ca.pem",
           "coordinator.pem": made / "coordinator.pem", "coordinator-key.pem": made / "coordinator-key.pem",
           "server.pem": made / f"{addresses[0]}.pem", "server-key.pem": made / f"{addresses[0]}-key.pem"}  # fmt: skip
    try:
        directory = credentials(SERVER, tmp_path / "credentials", etc)
        server = sandbox.start("server", command_line(SERVER, {}, directory), paths=paths)
        workers = []
        for name, address in zip(("gpu-a", "gpu-b"), addresses, strict=True):
            pair = {"worker.pem": made / f"{address}.pem", "worker-key.pem": made / f"{address}-key.pem"}
            directory = credentials(WORKER, tmp_path / f"credentials-of-{address}", etc | pair)
            workers.append(sandbox.start(name, command_line(WORKER, variables, directory), paths=paths))
        until(lambda: "serve.ready" in server.log or server.process.poll() is not None, 90)
        assert server.process.poll() is None, server.log
        yield server, workers, made / "ca.pem"
    finally:
        sandbox.close()


@pytest.mark.slow
def test_units_run_and_stop(started: tuple[Program, list[Program], Path]) -> None:
    """Workers on two hosts behind their certificates, the server behind its own; all exit cleanly, in their time."""
    server, workers, authority = started
    context = ssl.create_default_context(cafile=str(authority))
    # The certificate that stands in for the server's names another host.
    context.check_hostname = False
    request = urllib.request.Request(
        f"https://{server.address}:8000/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "Calculate 4729 + 3485."}], "max_tokens": 200}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        assert "8214" in json.load(answer)["choices"][0]["message"]["content"]
    assert all(answers_grpc(f"{worker.address}:7002", 5) for worker in workers)

    for name, programs in ((SERVER, [server]), (WORKER, workers)):
        seconds = float(unit(name)["TimeoutStopSec"][-1])
        began = time.monotonic()
        for program in programs:
            program.process.send_signal(signal.SIGTERM)
        for program in programs:
            assert program.process.wait(seconds - (time.monotonic() - began)) == 0, program.log


@pytest.mark.parametrize("name", [SERVER, WORKER])
def test_stopping_leaves_time_to_drain(name: str) -> None:
    """systemd's patience is above the program's; workers of the server hear of the end from it alone."""
    found = unit(name)
    [drain] = re.findall(r"--drain-timeout (\d+)", found["ExecStart"][0])
    assert float(found["TimeoutStopSec"][0]) > float(drain)
    assert found.get("KillMode") == (["mixed"] if name == SERVER else None)


@pytest.mark.parametrize("name", [SERVER, WORKER])
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    """Every setting is known to it, and what is left open is little."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (UNITS / name).read_text()
    for program in PROGRAMS:
        (tmp_path / program).touch(0o755)
    there = tmp_path / name.replace("@.", "@gpu0.")
    there.write_text(text.replace("/opt/flashsplit/bin", str(tmp_path)))
    verified = subprocess.run([analyze, "verify", "--man=no", str(there)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = [analyze, "security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(there)]
    exposed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert exposed.returncode == 0, exposed.stdout
