"""Real workers on TCP behind certificates and a token: the same tokens, and no way in for anybody else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.cli.commands.certs import certs
from services.net.cluster_token import VARIABLE
from tests.e2e.conftest import ROOT, Pair, alive, children, end, flashsplit, generate, refusal, until

TOKEN = "a-token-that-must-not-show-up-anywhere"

Cases = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass
class Secure:
    """Three workers as `flashsplit certs` says to start them, and what a coordinator needs for them."""

    certs: Path
    token_file: Path
    commands: list[list[str]]
    flags: list[str]
    health_port: int
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def start(self, command: list[str], *more: str) -> None:
        """A worker by its printed command line, on a free port; the token comes by the environment."""
        words = [sys.executable, "-m", "shard_worker", *command[1:], "--device", "cpu", "--threads", "1", *more]
        words[words.index("--listen") + 1] = "localhost:0"
        with self.log(len(self.processes)).open("wb") as log:
            environment = {**os.environ, VARIABLE: TOKEN}
            self.processes.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log))

    def log(self, index: int) -> Path:
        return self.folder / f"{index}.log"

    def listening(self) -> None:
        """Wait for all and take their addresses from their logs."""
        for index in range(len(self.processes)):
            until(lambda index=index: "worker.ready" in self.log(index).read_text(), 60)
            found = re.search(r'"address": "([^"]+)"', self.log(index).read_text())
            assert found is not None
            self.addresses.append(found[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """Started once for all tests here."""
    folder = tmp_path_factory.mktemp("secure")
    result = CliRunner().invoke(certs, ["--out", str(folder / "certs"), "--host", "localhost"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    commands = [shlex.split(line) for line in lines if "flashsplit-worker" in line]
    [printed] = [shlex.split(line) for line in lines if "flashsplit generate" in line]
    token_file = folder / "token"
    token_file.write_text(TOKEN + "\n")
    flags = printed[printed.index("--tls-cert") : printed.index("--model")]
    made = Secure(folder / "certs", token_file, commands, flags, free_port(), folder)
    with contextlib.ExitStack() as stack:
        made.start(commands[0], "--health-port", str(made.health_port))
        made.start(commands[0])
        made.start(commands[0], "--roles", "draft")
        for process in made.processes:
            stack.callback(end, process)
        made.listening()
        yield made


def placed(secure: Secure, pair: Pair, *devices: str) -> list[str]:
    return [
        *("--model", str(pair.target), "--draft", str(pair.draft), "--dtype", "float32"),
        *("--target-devices", ",".join(devices), "--ignore-eos"),
    ]


def test_same_tokens_and_snapshots_over_certificates_and_token(
    secure: Secure, pairs: dict[str, Pair], prefix_cases: Cases, tmp_path: Path
) -> None:
    """Two stages and a draft, each behind TLS: transformers' tokens; a second run, which splits the layers
    anew and so finds nothing in the workers' memory, takes the prefix from disk."""
    prompt, tokens = prefix_cases["qwen3"]
    one, two, draft = secure.addresses
    arguments = [
        *placed(secure, pairs["qwen3"], one, two),
        *("--draft-device", draft, "--prompt-ids", ",".join(map(str, prompt)), "--max-tokens", str(len(tokens))),
        *("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "8"),
        *(*secure.flags, "--cluster-token-file", str(secure.token_file)),
    ]

    first, second = generate(*arguments), generate(*arguments, "--target-layer-split", "0.3,0.7")

    for answer in (first, second):
        assert tuple(answer["token_ids"]) == tokens
        assert answer["stats"]["draft_tokens"] > 0
    assert first["stats"]["cached_tokens"] == 0
    assert second["stats"]["cache_source"] == "disk"
    assert [stage["address"] for stage in first["stats"]["stages"]] == [one, two]


def test_a_local_worker_calls_a_remote_one_and_the_token_shows_nowhere(
    secure: Secure, pairs: dict[str, Pair], prefix_cases: Cases
) -> None:
    """Local stage, remote stage, remote draft: the child has certificates and token, on no command line, in no log."""
    prompt, tokens = prefix_cases["qwen3"]
    _, two, draft = secure.addresses
    process = flashsplit(
        *("--log-level", "debug", "generate", *placed(secure, pairs["qwen3"], "cpu", two), "--draft-device", draft),
        *("--prompt-ids", ",".join(map(str, prompt)), "--max-tokens", len(tokens), "--json", *secure.flags),
        *("--cluster-token-file", secure.token_file),
    )
    seen = ""
    child: int | None = None
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        for pid in (process.pid, *children(process.pid)):
            with contextlib.suppress(OSError):
                seen += Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                child = pid if pid != process.pid else child
        time.sleep(0.1)
    out, err = process.communicate(timeout=10)

    assert process.returncode == 0, err
    assert tuple(json.loads(out)["token_ids"]) == tokens
    assert child is not None
    assert not alive(child)
    assert "shard_worker --listen unix:" in seen
    assert "--tls-cert" in seen
    logs = "".join(secure.log(index).read_text() for index in range(3))
    assert all(TOKEN not in text for text in (seen, out, err, logs))


def test_wrong_and_missing_tokens_are_told_with_the_stage(
    secure: Secure, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    """No more than a sentence; the log of the worker has the call, not the token."""
    (tmp_path / "wrong").write_text("another-token-than-the-workers'")
    arguments = [*placed(secure, pairs["qwen3"], secure.addresses[0]), "--prompt-ids", "1", *secure.flags]

    missing = refusal(*arguments)
    wrong = refusal(*arguments, "--cluster-token-file", tmp_path / "wrong")

    assert f"stage 0 ({secure.addresses[0]}): the call carried no token" in missing
    assert "carried another token" in wrong
    assert "another-token" not in wrong + secure.log(0).read_text()
    assert "call.refused" in secure.log(0).read_text()


def test_strangers_are_refused(secure: Secure, pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A coordinator of another authority, and one without certificates, each within seconds."""
    assert CliRunner().invoke(certs, ["--out", str(tmp_path / "other")]).exit_code == 0
    arguments = [*placed(secure, pairs["qwen3"], secure.addresses[0]), "--prompt-ids", "1"]
    arguments += ["--cluster-token-file", str(secure.token_file)]

    other = refusal(*arguments, *(flag.replace(str(secure.certs), str(tmp_path / "other")) for flag in secure.flags))
    plain = refusal(*arguments)

    assert "does not vouch for" in other
    assert "expects TLS: give --tls-cert, --tls-key and --tls-ca" in plain


def test_a_certificate_that_was_taken_back(secure: Secure, pairs: dict[str, Pair]) -> None:
    """Workers that run, with the list that `flashsplit certs` wrote, refuse who shows it from then on."""
    out = ["--out", str(secure.certs)]
    assert CliRunner().invoke(certs, [*out, "--host", "laptop"]).exit_code == 0
    for ending in (".pem", "-key.pem"):
        shutil.copy(secure.certs / f"laptop{ending}", secure.certs / f"stolen{ending}")
    assert CliRunner().invoke(certs, ["revoke", *out, "laptop"]).exit_code == 0
    flags = [flag.replace("coordinator", "stolen") for flag in secure.flags]

    message = refusal(
        *(*placed(secure, pairs["qwen3"], secure.addresses[0]), "--prompt-ids", "1", *flags),
        *("--cluster-token-file", str(secure.token_file)),
    )

    assert f"stage 0 ({secure.addresses[0]}): the caller's certificate" in message
    assert "is revoked: the server at" in message


def test_the_health_port_answers_probes(secure: Secure) -> None:
    """Plainly, without a token; the worker's own port doesn't."""
    with grpc.insecure_channel(f"localhost:{secure.health_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="flashsplit.shard.v1.StageService"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/flashsplit.shard.v1.WorkerService/Describe")(b"", timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(secure.addresses[0]) as channel, pytest.raises(grpc.RpcError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


def test_a_worker_that_was_never_told_stays_within_its_host(secure: Secure, tmp_path: Path) -> None:
    """Beyond loopback only with certificates or --insecure, whatever the token; wrong files end it with a sentence."""
    token = ["--cluster-token-file", str(secure.token_file)]
    tls = secure.commands[0][3:]
    cases = {
        "nothing would be encrypted, the cluster token neither": ["--listen", "0.0.0.0:0", *token],
        "--tls-ca is missing beside --tls-cert and --tls-key": ["--listen", "0.0.0.0:0", *tls[:4]],
        "--tls-ca /no/such.pem cannot be read": ["--listen", "0.0.0.0:0", *tls[:4], "--tls-ca", "/no/such.pem"],
        "--cluster-token-file /no/such cannot be read": ["--listen", "127.0.0.1:0", "--cluster-token-file", "/no/such"],
    }
    for words, arguments in cases.items():
        command = [sys.executable, "-m", "shard_worker", "--device", "cpu", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr

    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "shard_worker", "--device", "cpu", "--listen", "0.0.0.0:0", *tls, *token]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        until(lambda: "worker.ready" in log.read_text(), 60)
    finally:
        end(process)
    assert process.returncode in (0, -signal.SIGTERM)
