"""The command line of a worker: what it refuses before it listens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from shard_worker.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--listen'"),
        (["--listen", "127.0.0.1:0", "--roles", "target,oracle"], "--roles 'oracle' is not one of target, draft"),
        (["--listen", "127.0.0.1:0", "--threads", "0"], "--threads"),
        (["--listen", "0.0.0.0:7001"], "--insecure"),
        (["--listen", "0.0.0.0:7001"], "give --tls-cert, --tls-key and --tls-ca (flashsplit certs makes them)"),
        (["--listen", "127.0.0.1:0", "--tls-key", "a.pem"], "--tls-cert and --tls-ca are missing beside --tls-key"),
        (["--listen", "127.0.0.1:0", "--cluster-token-file", "/no/such"], "--cluster-token-file /no/such cannot be"),
        (["--listen", "127.0.0.1:0", "--health-port", "70000"], "--health-port"),
        (["--listen", "127.0.0.1:0", "--device", "gpu0"], "'gpu0' is not a device: use cpu, cuda:N or hip:N"),
        (["--listen", "127.0.0.1:0", "--device", "cpu+cuda:0"], "several vendors"),
        (["--listen", "127.0.0.1:0", "--prefix-cache-bytes", "lots"], "--prefix-cache-bytes is 'lots'"),
        (["--listen", "127.0.0.1:0", "--prefix-cache-bytes", "4 parsecs"], "unknown unit 'parsecs'"),
        (["--listen", "127.0.0.1:0", "--prefix-cache-bytes", "-1"], "--prefix-cache-bytes"),
    ],
)
def test_a_wrong_option_is_refused_with_what_would_be_right(arguments: list[str], words: str) -> None:
    """Status 2 and one sentence, without a traceback."""
    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_help_needs_no_device() -> None:
    """--help lists every option."""
    result = CliRunner().invoke(main, ["--help"])

    assert result.exit_code == 0
    for option in (
        "--listen",
        "--device",
        "--roles",
        "--model",
        "--draft",
        "--threads",
        "--prefix-cache-bytes",
        "--tls-cert",
        "--tls-key",
        "--tls-ca",
        "--tls-server-name",
        "--cluster-token-file",
        "--insecure",
        "--health-port",
    ):
        assert option in result.output


def test_a_worker_starts_without_a_compiler() -> None:
    """torch's own takes longer to import than all the rest; only GPU builds have a use for it."""
    line = (
        "import sys, torch, shard_worker.worker; print(torch.version.cuda, torch.version.hip, 'sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, timeout=60)
    *builds, compiler = done.stdout.split()
    assert compiler == str(builds != ["None", "None"])


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize(
    ("told", "policy"), [(None, "PASSIVE"), pytest.param("active", "ACTIVE", marks=pytest.mark.slow)]
)
def test_threads_wait_asleep_unless_told_otherwise(told: str | None, policy: str) -> None:
    """OpenMP itself says so: torch's threads must not look for work for long on cores that others need."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if told is None else {"OMP_WAIT_POLICY": told})
    command = [sys.executable, "-m", "shard_worker", "--list-devices"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
    assert ("GOMP_SPINCOUNT = '300'" in done.stderr) is (told is None)
